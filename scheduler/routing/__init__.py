"""Chooses the prefill server, or replica, of a prompt: by queue, by cached prefix, by what has to be loaded."""
