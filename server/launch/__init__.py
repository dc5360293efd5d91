"""Starts and supervises the processes of a server, and connects them."""
