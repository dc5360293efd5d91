"""A gateway for SGLang decode engines: the HTTP side that SGLang's routers take for a prefill server. Experimental."""
