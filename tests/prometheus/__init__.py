"""A real Prometheus that scrapes a pair (make test-prometheus)."""
