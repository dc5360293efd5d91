"""A gateway for vLLM decode engines: HTTP for routers, and the handoff of KV that vLLM's NixlConnector reads."""
