"""Health, metrics, discovery, tokenization and traces."""
