"""The handoff: protocol messages, sessions, control endpoint and control client, sender and receiver, page layout,
metadata rows."""
