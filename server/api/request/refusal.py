"""Notifies the peer of a ticket when its request is refused before it is submitted."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from headrace.core.config import ServerConfig
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.completion_request import request_sources
from headrace.server.frontend.generation.completions import Completions
from headrace.server.http.body import SMALL
from headrace.server.upstream.handoff_params import BatchShape, HandoffParams, kv_sinks


@asynccontextmanager
async def notify_peers_on_refusal(
    completions: Completions, config: ServerConfig, raw: bytes | bytearray
) -> AsyncIterator[None]:
    """When the block raises HeadraceError, notifies the other server of each ticket that the body names: decode peers
    on a prefill server, prefill servers on a decode server. They would wait until a deadline otherwise. Fields that
    cannot be decoded are left out."""
    try:
        yield
    except HeadraceError as error:
        if config.role == "colocated" or not await _may_name_tickets(raw):  # decoding a large body would hold up others
            raise
        with suppress(*NO_MESSAGE):
            refused = msgspec.json.decode(raw, type=_Refused)
            if config.role == "prefill":
                completions.refuse_tickets(_tickets(refused), error.info)
            else:
                with suppress(HeadraceError):
                    sources = request_sources(_handoff(refused), _shape(refused), config)
                    completions.release_sources(sources or (), error.info.message)
        raise


_NAMES = (b"ticket", b"kv_transfer_params", b"bootstrap_")  # of the fields that may name tickets


async def _may_name_tickets(raw: bytes | bytearray) -> bool:
    return _has_names(raw) if len(raw) <= SMALL else await asyncio.to_thread(_has_names, raw)


def _has_names(raw: bytes | bytearray) -> bool:
    """Steps of SMALL bytes, between which other threads get their turn."""
    starts = range(0, len(raw), SMALL)
    return any(raw.find(name, at, at + SMALL + len(name)) >= 0 for at in starts for name in _NAMES)


NULL = msgspec.Raw(b"null")
_PROMPTS = re.compile(rb"\s*\[\s*[^\s0-9-]")


class _Refused(msgspec.Struct):
    """The fields of all routes that name tickets, or say how many prompts and choices there are; of any type, since it
    may be one of them that is refused."""

    ticket: Any = None
    kv_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    prompt: msgspec.Raw = NULL
    text: msgspec.Raw = NULL
    input_ids: msgspec.Raw = NULL
    n: Any = None
    best_of: Any = None
    sampling_params: Any = None


def _tickets(refused: _Refused) -> list[str]:
    """Tickets that the body names, without one that this server would make up, which no peer knows."""
    found = [refused.ticket] if isinstance(refused.ticket, str) else []
    with suppress(HeadraceError, msgspec.ValidationError):
        body = _handoff(refused)
        made_up = body.kv_transfer_params is not None and body.kv_transfer_params.transfer_id is None
        sinks = kv_sinks(body, _shape(refused), "")
        found += [sink.ticket for sink in sinks or () if sink.ticket is not None and not made_up]
    return found


def _handoff(refused: _Refused) -> HandoffParams:
    """Raises msgspec.ValidationError for a field of a wrong type."""
    if refused.kv_transfer_params is None and isinstance(refused.sampling_params, dict):
        extra = refused.sampling_params.get("extra_args")
        refused.kv_transfer_params = extra.get("kv_transfer_params") if isinstance(extra, dict) else None
    return msgspec.convert(refused, HandoffParams, from_attributes=True)


def _list(value: msgspec.Raw) -> list[Any]:
    """The items of a list of prompts; empty for anything else: a text or token ids are one prompt, maybe a long one."""
    if not _PROMPTS.match(value):
        return []
    with suppress(*NO_MESSAGE):
        return msgspec.json.decode(value, type=list[Any])
    return []


def _shape(refused: _Refused) -> BatchShape:
    items = _list(next((value for value in (refused.prompt, refused.text, refused.input_ids) if value != NULL), NULL))
    several = not set(map(type, items)) <= {int}
    sampling = refused.sampling_params
    given = (sampling.get("n"),) if isinstance(sampling, dict) else (refused.n, refused.best_of)
    return BatchShape(len(items) if several else 1, max((n for n in given if isinstance(n, int) and n > 0), default=1))
