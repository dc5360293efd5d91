"""The server: HTTP front end, command line, configuration, launch and supervision."""
