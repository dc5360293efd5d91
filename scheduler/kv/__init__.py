"""KV pages: allocator, leases, prefix tree, and the events that tell routers of it."""
