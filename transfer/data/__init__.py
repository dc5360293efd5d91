"""Data connections: KV chunks from senders to receivers, with flow control and acknowledgements."""
