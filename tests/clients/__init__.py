"""Official clients against a pair, from their packages (make test-clients)."""
