"""The gateway of stock SGLang decode engines: HTTP, rooms, handoffs."""
