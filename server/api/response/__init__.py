"""Responses: whole, streamed, of a prefill server, and errors."""
