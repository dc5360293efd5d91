"""SGLang decode engines, fed by SGLang's NIXL protocol. Experimental: written from the sources of SGLang 0.5.23, never
run against the engine."""

NEVER_RUN = "experimental: written from the sources of SGLang 0.5.23, never run against an SGLang engine"
