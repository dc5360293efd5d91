"""The HTTP/1.1 server under every application: heads as RFC 9110 and 9112 have them, limits, ASGI."""
