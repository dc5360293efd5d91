"""The wire protocol, without I/O: messages, compatibility check, KV layout, metadata rows, checksums."""
