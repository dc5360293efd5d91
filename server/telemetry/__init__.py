"""Prometheus metrics, traces for Perfetto, and KV cache events."""
