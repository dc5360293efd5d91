"""The handoff: protocol messages, sessions, desk and dialer, sender and receiver, page layout, metadata rows."""
