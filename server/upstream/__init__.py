"""Prefill servers of a decode server, and the request fields that name a KV handoff."""
