"""Adapters that run inside other engines: vLLM's KV connector, transformers' cache, and the peer library below both."""
