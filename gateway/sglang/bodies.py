"""Bodies of SGLang's routers: the room that they name, and what a Headrace prefill server is asked instead. Pure."""

from collections.abc import Collection
from typing import Annotated, Any

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid
from headrace.core.types.peers.addresses import host_port
from headrace.gateway.sglang_nixl.records import HeldPrompt
from headrace.gateway.sglang_nixl.wire import MAX_ROOM
from headrace.peer.commands import TicketRef
from headrace.server.upstream.handoff_params import NO_TRANSFER_HOST

BOOTSTRAP_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
STREAM_FIELDS = ("stream", "stream_options")  # the answer has one token; the decode engine streams
PROMPT_FIELDS = ("prompt", "text", "input_ids")
MOST_REFUSED = 256  # rooms of one body


class SglangBody(msgspec.Struct, frozen=True):
    """A router's body, taken apart."""

    room: int | None
    """None: nothing is to be transferred."""
    fields: dict[str, Any]
    """Fields of the body for a prefill server, but for kv_transfer_params."""

    def posted(self, ticket: str) -> bytes:
        """The body for a prefill server, which is to hold the KV under this ticket."""
        params = {"do_remote_decode": True, "transfer_id": ticket}
        return msgspec.json.encode({**self.fields, "kv_transfer_params": params})


class HoldParams(msgspec.Struct):
    """kv_transfer_params in a prefill server's answer: what is needed of them."""

    remote_num_tokens: int
    tickets: list[str]
    prompt_hashes: list[str]
    fingerprint: str
    lease_s: float


class HoldAnswer(msgspec.Struct):
    """The answer of a prefill server: what is needed of it."""

    kv_transfer_params: HoldParams


class ListedModel(msgspec.Struct, frozen=True):
    """An entry of GET /v1/models of a prefill server."""

    id: str
    max_model_len: int
    parent: str | None = None
    """Of an adapter: the name of its model."""


class ListedModels(msgspec.Struct, frozen=True):
    """GET /v1/models of a prefill server."""

    data: Annotated[list[ListedModel], msgspec.Meta(min_length=1)]


def take_apart(fields: dict[str, Any], served: Collection[str] = ()) -> SglangBody:
    """A decoded body. served: names of the model. Raises HeadraceError (400), naming the field, for one that cannot be
    handed over."""
    asked = _with_adapter(fields, served)
    rest = {name: value for name, value in asked.items() if name not in (*BOOTSTRAP_FIELDS, *STREAM_FIELDS)}
    if fields.get("bootstrap_host") == NO_TRANSFER_HOST:  # SGLang's warm-up and health checks
        return SglangBody(None, {name: asked[name] for name in asked if name not in STREAM_FIELDS})
    if "kv_transfer_params" in rest:
        raise invalid("kv_transfer_params", "kv_transfer_params is vLLM's; SGLang's routers send bootstrap_room")
    _check_single(fields)
    room = fields.get("bootstrap_room")
    if isinstance(room, list) and len(room) == 1:
        [room] = room
    if room is None:
        message = "bootstrap_room is missing: send requests through a router that names one to both sides"
        raise invalid("bootstrap_room", message, code="missing_field")
    if not _is_room(room):
        raise invalid("bootstrap_room", f"bootstrap_room has to be a whole number from 1 to {MAX_ROOM}")
    return SglangBody(room, rest)


def rooms_of(fields: dict[str, Any]) -> list[int]:
    """The rooms for which decode engines wait on account of a body that is refused: SGLang counts on from the one that
    is given, over prompts and choices."""
    room: Any = fields.get("bootstrap_room")
    if not isinstance(room, list):
        room = [room + number for number in range(_choices(fields))] if _is_room(room) else []
    return [each for each in room if _is_room(each)][:MOST_REFUSED]


def held_at(content: bytes, host: str, port: int) -> HeldPrompt:
    """What the prefill server with this control endpoint holds, by its answer. Raises HeadraceError (502)."""
    try:
        params = msgspec.json.decode(content, type=HoldAnswer).kv_transfer_params
        [ticket], [prompt_hash] = params.tickets, params.prompt_hashes
    except (*NO_MESSAGE, ValueError) as error:
        message = f"prefill server {host_port(host, port)} answered without the KV of one prompt: {error}"
        raise HeadraceError(ErrorInfo(code="bad_prefill_answer", message=message, status=502)) from error
    place = TicketRef(name=ticket, host=host, port=port, wait=False, fingerprint=params.fingerprint)
    return HeldPrompt(ticket=place, tokens=params.remote_num_tokens, prompt_hash=prompt_hash)


def without_params(content: bytes) -> bytes:
    """A prefill server's answer as the router gets it."""
    answer = msgspec.json.decode(content)
    return msgspec.json.encode({name: value for name, value in answer.items() if name != "kv_transfer_params"})


def _with_adapter(fields: dict[str, Any], served: Collection[str]) -> dict[str, Any]:
    """The fields with the model that SGLang reads out of them: it takes every name for the model itself, but for what
    follows a colon, which is that of an adapter."""
    name = fields.get("model")
    if not isinstance(name, str):
        return fields
    rest = {key: value for key, value in fields.items() if key != "model"}
    base = max((each for each in served if name == each or name.startswith(f"{each}:")), key=len, default=None)
    adapter = (name.removeprefix(base) if base is not None else name[name.find(":") :] if ":" in name else "")[1:]
    return rest | {"model": adapter.strip()} if adapter.strip() else rest


def _is_room(room: object) -> bool:
    """Room 0 is none: a metadata row of SGLang's says with it that it has not come."""
    return isinstance(room, int) and not isinstance(room, bool) and 1 <= room <= MAX_ROOM


def _n(fields: dict[str, Any]) -> Any:
    sampling = fields.get("sampling_params")
    return fields.get("n") or (sampling.get("n") if isinstance(sampling, dict) else None)


def _choices(fields: dict[str, Any]) -> int:
    """Choices of all prompts, but not more than are refused at once."""
    prompts = max((len(fields[name]) for name in PROMPT_FIELDS if _is_list(fields.get(name))), default=1)
    n = _n(fields)
    return min(prompts * (n if isinstance(n, int) and 1 <= n <= MOST_REFUSED else 1), MOST_REFUSED)


def _is_list(prompt: object) -> bool:
    """Whether it is a list of prompts."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _check_single(fields: dict[str, Any]) -> None:
    """Raises HeadraceError (400) for several prompts or choices, of which each would need a room of its own."""
    n = _n(fields)
    if n not in (None, 1):
        raise invalid("n", f"n is {n}; the gateway for SGLang hands over one choice for each request")
    room = fields.get("bootstrap_room")
    if isinstance(room, list) and len(room) != 1:
        message = (
            f"bootstrap_room names {len(room)} rooms; the gateway for SGLang hands over one prompt for each request"
        )
        raise invalid("bootstrap_room", message)
    for name in PROMPT_FIELDS:
        if _is_list(fields.get(name)):
            message = f"{name} is a list of prompts; the gateway for SGLang hands over one for each request"
            raise invalid(name, message)
