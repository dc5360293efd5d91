"""KV of the beginning of a prompt that is at its decode server: the next prefill server may go on from there."""

from typing import Annotated

import msgspec


class Resume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a decode server has of a prompt that another prefill server has not finished (`resume` of POST
    /v1/prefill)."""

    ticket: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """Under which the decode server sends it, as a prefix."""
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """Of the decode server's control endpoint, on the host that the request comes from."""
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    """Leading ones of the prompt whose KV it has."""
