"""Values that several parts share: requests, KV geometry, backends, addresses, errors."""
