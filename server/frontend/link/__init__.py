"""The link to the scheduler: its socket, the client of it, calls."""
