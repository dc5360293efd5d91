"""Transfer backends: one-sided writes into the peer's pool by shared memory or NIXL. Control always goes over ZMQ."""
