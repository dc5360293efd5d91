"""Notifies the peer of a ticket when its request is refused before it is submitted."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from headrace.core.config import ServerConfig
from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.body import parse_body
from headrace.server.api.request.completion_request import request_sources
from headrace.server.frontend.completions import Completions
from headrace.server.upstream.handoff_params import BatchShape, HandoffParams, kv_sinks


@contextmanager
def notify_peers_on_refusal(completions: Completions, config: ServerConfig, raw: bytes) -> Iterator[None]:
    """When the block raises HeadraceError, notifies the other server of each ticket that the body names: decode peers
    on a prefill server, prefill servers on a decode server. They would wait until a deadline otherwise. Fields that
    cannot be decoded are left out."""
    try:
        yield
    except HeadraceError as error:
        if config.role == "prefill":
            completions.refuse_tickets(_tickets(raw), error.info)
        elif config.role == "decode":
            with suppress(HeadraceError):
                sources = request_sources(parse_body(raw, HandoffParams), _shape(raw), config)
                completions.release_sources(sources or (), error.info.message)
        raise


class _Ticket(msgspec.Struct):
    ticket: str | None = None


class _Prompts(msgspec.Struct):
    """The fields of all routes that say how many prompts and choices there are."""

    prompt: Any = None
    text: Any = None
    input_ids: Any = None
    n: Any = None
    sampling_params: Any = None


def _tickets(raw: bytes) -> list[str]:
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


def _shape(raw: bytes) -> BatchShape:
    """Raises HeadraceError (400) for a body that is not a JSON object."""
    body = parse_body(raw, _Prompts)
    given = next((value for value in (body.prompt, body.text, body.input_ids) if value is not None), None)
    several = isinstance(given, list) and not all(isinstance(item, int) for item in given)
    n = body.sampling_params.get("n") if isinstance(body.sampling_params, dict) else body.n
    prompts = len(given) if several and isinstance(given, list) else 1
    return BatchShape(prompts, n if isinstance(n, int) and n > 0 else 1)
