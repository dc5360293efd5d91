"""Control connections: hello, sessions, tickets, heartbeats; the server at the prefill side, the client at the decode
side."""
