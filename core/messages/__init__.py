"""Messages between the processes of one server: front end, scheduler and stages."""
