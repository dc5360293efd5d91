"""What KV is made of: geometry, backends, tiers."""
