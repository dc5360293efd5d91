"""Headers by which llm-d's router tells a decode server what becomes of a prompt that its body says nothing of.

x-prefiller-host-port: HOST:PORT of the prefill server that is to compute it; of several, the first. Its sidecar reads
the same header, and answers 403 to addresses that it is not configured to accept, as we do (--allow-prefill).
Prefer: if-available (RFC 7240): only if most of the prompt is in the prefix cache; else 412, upon which the coordinator
has a prefill server compute it, and asks again.
x-kv-cache-source-host-port: HOST:PORT of a server that holds a prefix of the prompt. A prefill server asks it alone, if
it is one of its siblings (--sibling); another address changes nothing.
"""

from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers

from headrace.core.config import ServerConfig
from headrace.core.types.errors import HeadraceError, invalid, shown
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.upstream.handoff_params import MAX_ADDRESS_CHARS, PrefillAddress

PREFILLER_HEADER = "x-prefiller-host-port"
HOLDER_HEADER = "x-kv-cache-source-host-port"
PREFER_HEADER = "prefer"
IF_AVAILABLE = "if-available"


def with_router_headers(
    requests: Sequence[GenerationRequest], headers: Headers, config: ServerConfig
) -> list[GenerationRequest]:
    """The requests of one body, on a server that decodes. What a body names goes before headers. Raises HeadraceError
    (400) for an address that is none."""
    if config.role != "decode" or any(request.kv_source is not None for request in requests):
        return list(requests)
    if (address := prefiller_address(headers)) is not None:
        return [msgspec.structs.replace(request, prefill_at=address) for request in requests]
    if not config.if_available_tokens or not is_conditional(headers):
        return list(requests)
    return [
        msgspec.structs.replace(
            request, terms=msgspec.structs.replace(request.terms, uncached_limit=config.if_available_tokens)
        )
        for request in requests
    ]


def is_conditional(headers: Headers) -> bool:
    """Whether one of the preferences, which may have parameters, is if-available."""
    tokens = (
        each.partition(";")[0].strip().lower() for value in headers.getlist(PREFER_HEADER) for each in value.split(",")
    )
    return IF_AVAILABLE in tokens


def with_kv_holder(request: GenerationRequest, headers: Headers) -> GenerationRequest:
    """The request with the server that a router says to hold a prefix of it. A hint: what is no address is passed
    over."""
    with suppress(HeadraceError):
        return msgspec.structs.replace(request, kv_held_at=prefiller_address(headers, HOLDER_HEADER))
    return request


def prefiller_address(headers: Headers, header: str = PREFILLER_HEADER) -> PrefillAddress | None:
    """The HTTP address of the prefill server that is named first; None for none. Raises HeadraceError (400)."""
    text = ",".join(headers.getlist(header)).partition(",")[0].strip().removeprefix("http://")
    if not text:
        return None
    host = port = None
    with suppress(ValueError):
        if len(text) <= MAX_ADDRESS_CHARS and "@" not in text:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, parts.port
            if parts.path or parts.query or parts.fragment:
                host = None
    if not host or not port:
        message = f"the header {header} is {shown(text)!r}; it has to be HOST:PORT"
        raise invalid(header, message)
    return PrefillAddress("http", host, port)
