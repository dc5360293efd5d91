"""Messages between the processes of a server, as msgspec structs."""
