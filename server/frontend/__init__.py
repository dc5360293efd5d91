"""The front end without HTTP: admission, generation, readiness, and the connection to the scheduler."""
