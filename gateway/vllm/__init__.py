"""The gateway of stock vLLM decode engines: HTTP, engines, handoffs."""
