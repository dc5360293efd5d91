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
from headrace.server.api.request.parse import parse_body
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
        if config.role == "prefill":
            completions.refuse_tickets(_tickets(raw), error.info)
        elif config.role == "decode":
            with suppress(HeadraceError):
                sources = request_sources(parse_body(raw, HandoffParams), _shape(raw), config)
                completions.release_sources(sources or (), error.info.message)
        raise


_NAMES = (b"ticket", b"kv_transfer_params", b"bootstrap_")  # of the fields that may name tickets


async def _may_name_tickets(raw: bytes | bytearray) -> bool:
    return _has_names(raw) if len(raw) <= SMALL else await asyncio.to_thread(_has_names, raw)


def _has_names(raw: bytes | bytearray) -> bool:
    """Steps of SMALL bytes, between which other threads get their turn."""
    starts = range(0, len(raw), SMALL)
    return any(raw.find(name, at, at + SMALL + len(name)) >= 0 for at in starts for name in _NAMES)


class _Ticket(msgspec.Struct):
    ticket: str | None = None


NULL = msgspec.Raw(b"null")
_PROMPTS = re.compile(rb"\s*\[\s*[^\s0-9-]")


class _Prompts(msgspec.Struct):
    """The fields of all routes that say how many prompts and choices there are."""

    prompt: msgspec.Raw = NULL
    text: msgspec.Raw = NULL
    input_ids: msgspec.Raw = NULL
    n: Any = None
    best_of: Any = None
    sampling_params: Any = None


def _tickets(raw: bytes | bytearray) -> list[str]:
    """Tickets that the body names, without one that this server would make up, which no peer knows."""
    found: list[str] = []
    with suppress(HeadraceError):
        if (ticket := parse_body(raw, _Ticket).ticket) is not None:
            found.append(ticket)
    with suppress(HeadraceError):
        body = parse_body(raw, HandoffParams)
        made_up = body.kv_transfer_params is not None and body.kv_transfer_params.transfer_id is None
        sinks = kv_sinks(body, _shape(raw), "")
        found += [sink.ticket for sink in sinks or () if sink.ticket is not None and not made_up]
    return found


def _list(value: msgspec.Raw) -> list[Any]:
    """The items of a list of prompts; empty for anything else: a text or token ids are one prompt, maybe a long one."""
    if not _PROMPTS.match(value):
        return []
    with suppress(*NO_MESSAGE):
        return msgspec.json.decode(value, type=list[Any])
    return []


def _shape(raw: bytes | bytearray) -> BatchShape:
    """Raises HeadraceError (400) for a body that is not a JSON object."""
    body = parse_body(raw, _Prompts)
    items = _list(next((value for value in (body.prompt, body.text, body.input_ids) if value != NULL), NULL))
    several = not set(map(type, items)) <= {int}
    given = (body.sampling_params.get("n"),) if isinstance(body.sampling_params, dict) else (body.n, body.best_of)
    return BatchShape(len(items) if several else 1, max((n for n in given if isinstance(n, int) and n > 0), default=1))
