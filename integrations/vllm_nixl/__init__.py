"""Prefill side of vLLM's NixlConnector (pull mode): stock vLLM decode engines read their prompts' KV from here."""
