"""The protocol of vLLM's NixlConnector, as its decode engines speak it."""
