"""ZMQ sockets with the options that the protocol relies on, and CURVE keys and authentication."""
