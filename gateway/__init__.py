"""Gateways: stock decode engines of other makes behind their own protocols, and KV from prefill servers."""
