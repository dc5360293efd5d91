"""Request terms: what a client, a router or its API key says of how a request is scheduled."""

import msgspec

from headrace.core.types.requests.adapters import adapter_salt
from headrace.core.types.requests.kv_hints import Retain


class RequestTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Terms of one request, carried unchanged from its checked body to the scheduler's record of it."""

    priority: int = 0
    """Class of the request: a lower one goes before all higher ones, except under --policy fcfs."""

    tenant: str = ""
    """Name of the API key that it came with; "" for none: those are one tenant, and its parts go by cache salt."""

    replica: int | None = None
    """The data-parallel replica that is to compute it; None: the one with the least load."""

    slo_ttft_s: float | None = None
    """Seconds within which the client would like its first token; None: no objective."""

    deadline_s: float | None = None
    """Seconds that the client waits in all; None: no limit."""

    uncached_limit: int | None = None
    """Prompt tokens that are not cached, at or above which a decode server refuses it (412); None: it computes or
    fetches them."""

    cache_salt: str = ""
    """Prompts share cached pages only with prompts of the same salt."""

    keep_tokens: int | None = None
    """The prefix cache keeps nothing of it behind so many positions; None: it keeps all full pages."""

    adapter: str = ""
    """Fingerprint of the LoRA adapter that it goes through; "" for none."""

    image_digest: str = ""
    """Digest of the images of its prompt (headrace.core.types.requests.images.images_digest); "" for none."""

    retain: Retain | None = None
    """Keep its KV in the pool when it has ended well, within its tenant's bound; None: it has no hint."""

    session: str = ""
    """Digest of the name of the conversation that it is a turn of; "" for none. Equal names of other tenants and cache
    salts are other conversations."""

    demote: bool = False
    """Its KV leaves the pool for a tier when it has ended well."""

    let_go: bool = False
    """Its KV is not needed any more when it has ended well: it leaves the pool before any other."""

    @property
    def prefix_salt(self) -> str:
        """The salt of the prefix cache: that of the client, apart for each adapter."""
        return adapter_salt(self.adapter, self.cache_salt)
