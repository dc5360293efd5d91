"""The protocol of SGLang's NIXL backend, as its decode engines speak it."""
