"""Fields of a request that name a KV handoff: tickets at a prefill server, KV sources at a decode server.

An HTTP request has one generation request for each prompt and choice, ordered prompt by prompt, each with a ticket of
its own. A name that is given once for all of them gets numbers: "name" for a single one, "name/0", "name/1", ... for
several. Bootstrap room R is the name "room:R".
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from headrace.core.types.errors import HeadraceError, invalid, shown

NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's bootstrap_host for a prompt whose KV is not transferred
BOOTSTRAP_PORT = 8998  # default of SGLang and Mooncake
MAX_TICKET_CHARS = 256
MAX_NAME_CHARS = 240  # leaves room for the number
MAX_ROOM = (1 << 64) - 1

# Longer numbers would be read in a time that grows with the square of their length.
TokenId = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
MAX_ADDRESS_CHARS = 512

T = TypeVar("T")


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """kv_transfer_params of vLLM: the fields of its NIXL and Mooncake connectors that apply here, and our tickets."""

    do_remote_decode: bool | None = None
    """True asks a prefill server to hold the KV."""
    do_remote_prefill: bool | None = None
    """True asks a decode server to fetch the KV."""
    transfer_id: str | None = None
    """Name of the handoff, chosen by the router; tickets are derived from it."""
    remote_engine_id: str | None = None
    """Instance id of the prefill server."""
    remote_request_id: str | None = None
    """NIXL's name of a ticket."""
    remote_host: str | None = None
    """Host of the prefill server's control endpoint."""
    remote_port: int | None = None
    """TCP port of the prefill server's control endpoint."""
    remote_bootstrap_addr: str | None = None
    """http://HOST:PORT that tells where the control endpoint is."""
    ticket: str | None = None
    """The ticket of a single prompt."""
    tickets: list[str] | None = None
    """One ticket for each prompt and choice."""
    prompt_token_ids: list[TokenId | list[TokenId]] | None = None
    """Token ids that the prefill server computed; a list of lists for several prompts."""


class HandoffFields(Protocol):
    """A request body that can name a handoff."""

    @property
    def kv_transfer_params(self) -> TransferParams | None:
        """vLLM's."""

    @property
    def bootstrap_host(self) -> str | list[str | None] | None:
        """SGLang's; so are the next two."""

    @property
    def bootstrap_port(self) -> int | list[int | None] | None:
        """Of the host."""

    @property
    def bootstrap_room(self) -> int | list[int] | None:
        """The name of the handoff."""


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True):
    """The handoff fields alone, for bodies whose other fields cannot be decoded."""

    kv_transfer_params: TransferParams | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class BatchShape(msgspec.Struct, frozen=True):
    """Numbers of prompts, and of choices for each, in an HTTP request."""

    prompts: int
    choices: int

    @property
    def count(self) -> int:
        """Generation requests in all."""
        return self.prompts * self.choices


class KvSink(msgspec.Struct, frozen=True):
    """Where a prefill server sends the KV of a request."""

    ticket: str | None
    """Name under which a decode peer fetches it; None drops it."""
    hold: bool = False
    """Respond when the prompt is computed, and hold the KV for the peer. The client's limits are not known yet."""


class PrefillAddress(msgspec.Struct, frozen=True):
    """Where a request says that a prefill server is."""

    kind: Literal["control", "http"]
    """Whether the port is that of the control endpoint, or an HTTP port that tells where the control endpoint is."""
    host: str
    port: int
    engine: str = ""
    """Instance id of the server, "" if it is not given."""


class PrefixOffer(msgspec.Struct, frozen=True):
    """Where a decode server has the KV of a prompt's first tokens."""

    address: PrefillAddress
    """Of its control endpoint."""
    ticket: str
    tokens: int


class KvSource(msgspec.Struct, frozen=True):
    """Where a decode server fetches the KV of a request."""

    address: PrefillAddress | None
    """None if nothing is transferred, and the prompt is computed here."""
    ticket: str
    wait: bool = True
    """The prompt may still be on its way to the prefill server."""
    held: bool = False
    """The prompt was computed without knowing the client's limits and stop conditions."""


def kv_sinks(body: HandoffFields, batch: BatchShape, new_name: str) -> list[KvSink] | None:
    """Where a prefill server sends the KV of each request; None if the body names no handoff. new_name: used if the
    body leaves the name to the server. Raises HeadraceError (400)."""
    params = body.kv_transfer_params
    if params is not None and params.do_remote_prefill:
        message = "kv_transfer_params.do_remote_prefill asks a decode server; this is a prefill server"
        raise invalid("kv_transfer_params.do_remote_prefill", message)
    if params is not None and params.do_remote_decode:
        _require_single_handoff(body)
        name = new_name if params.transfer_id is None else _name("transfer_id", params.transfer_id)
        return [KvSink(ticket, hold=True) for ticket in numbered_tickets(name, batch.count)]
    if not _has_room(body):
        return None
    hosts = _broadcast("bootstrap_host", body.bootstrap_host, batch)
    return [
        KvSink(None if host == NO_TRANSFER_HOST else ticket)
        for host, ticket in zip(hosts, _rooms(body, batch), strict=True)
    ]


def kv_sources(body: HandoffFields, batch: BatchShape, default_port: int) -> list[KvSource] | None:
    """Where a decode server fetches the KV of each request; None if the body does not say. default_port: of a
    bootstrap_host without a port. Raises HeadraceError (400)."""
    params = body.kv_transfer_params
    if params is not None and params.do_remote_decode:
        message = "kv_transfer_params.do_remote_decode asks a prefill server; this server decodes"
        raise invalid("kv_transfer_params.do_remote_decode", message)
    if params is not None and params.do_remote_prefill:
        _require_single_handoff(body)
        address = _bootstrap_address(params) if params.remote_host is None else _control_address(params)
        waits = params.remote_host is None
        return [KvSource(address, ticket, wait=waits, held=True) for ticket in _tickets(params, batch.count)]
    if not _has_room(body):
        return None
    hosts = _broadcast("bootstrap_host", body.bootstrap_host, batch)
    ports = _broadcast("bootstrap_port", body.bootstrap_port, batch)
    return [
        KvSource(_http_address(host, port or default_port), ticket)
        for host, port, ticket in zip(hosts, ports, _rooms(body, batch), strict=True)
    ]


def numbered_tickets(name: str, count: int) -> list[str]:
    """The tickets of requests that share a name."""
    return [name] if count == 1 else [f"{name}/{index}" for index in range(count)]


def prompt_ids(body: HandoffFields, prompts: int) -> Sequence[list[int]] | None:
    """Token ids of each prompt as the prefill server reported them; None if it did not, or for another number of
    prompts."""
    params = body.kv_transfer_params
    given = params.prompt_token_ids if params is not None and params.do_remote_prefill else None
    if not given:
        return None
    lists = [item for item in given if isinstance(item, list)]
    flat = [item for item in given if isinstance(item, int)]
    found = [flat] if len(flat) == len(given) else lists
    return found if len(found) == prompts else None


def _require_single_handoff(body: HandoffFields) -> None:
    if body.bootstrap_room is not None:
        message = "kv_transfer_params and bootstrap_room name two different handoffs; send one of them"
        raise invalid("bootstrap_room", message)


def _has_room(body: HandoffFields) -> bool:
    """Raises HeadraceError (400) for a host without a room."""
    if body.bootstrap_room is None and body.bootstrap_host is not None:
        message = "bootstrap_room is required where bootstrap_host is given"
        raise invalid("bootstrap_room", message, code="missing_field")
    return body.bootstrap_room is not None


def _rooms(body: HandoffFields, batch: BatchShape) -> list[str]:
    """One ticket for each request, from one room for all of them, one for each prompt, or one for each request."""
    given = body.bootstrap_room
    rooms = given if isinstance(given, list) else [given or 0]
    for index, room in enumerate(rooms):
        if not 0 <= room <= MAX_ROOM:
            field = f"bootstrap_room[{index}]" if isinstance(given, list) else "bootstrap_room"
            raise invalid(field, f"{field} is {room}; it has to be from 0 to {MAX_ROOM}")
    if not isinstance(given, list):
        return numbered_tickets(f"room:{given}", batch.count)
    if len(given) == batch.count:
        return [f"room:{room}" for room in given]
    if len(given) == batch.prompts:
        return [ticket for room in given for ticket in numbered_tickets(f"room:{room}", batch.choices)]
    raise _wrong_length("bootstrap_room", len(given), batch)


def _broadcast(field: str, given: T | list[T | None] | None, batch: BatchShape) -> list[T | None]:
    """One value for each request."""
    if not isinstance(given, list):
        return [given] * batch.count
    if len(given) == batch.count:
        return given
    if len(given) == batch.prompts:
        return [value for value in given for _ in range(batch.choices)]
    raise _wrong_length(field, len(given), batch)


def _wrong_length(field: str, length: int, batch: BatchShape) -> HeadraceError:
    wanted = f"{batch.prompts}" if batch.choices == 1 else f"{batch.prompts} or {batch.count}"
    message = f"{field} has {length} entries and the request has {batch.prompts} prompts; send {wanted} or one value"
    return invalid(field, message)


def _tickets(params: TransferParams, count: int) -> list[str]:
    if params.tickets is not None:
        if len(params.tickets) != count:
            message = f"kv_transfer_params.tickets has {len(params.tickets)} entries; this request needs {count}"
            raise invalid("kv_transfer_params.tickets", message)
        return [_name(f"tickets[{index}]", ticket, MAX_TICKET_CHARS) for index, ticket in enumerate(params.tickets)]
    if params.transfer_id is not None:
        return numbered_tickets(_name("transfer_id", params.transfer_id), count)
    field = "ticket" if params.ticket is not None else "remote_request_id"
    name = params.ticket or params.remote_request_id
    if name is None:
        message = "kv_transfer_params.ticket is missing, and so are tickets, transfer_id and remote_request_id"
        raise invalid("kv_transfer_params.ticket", message, code="missing_field")
    if count > 1:
        message = f"this request needs {count} tickets; send them in kv_transfer_params.tickets"
        raise invalid("kv_transfer_params.tickets", message, code="missing_field")
    return [_name(field, name, MAX_TICKET_CHARS)]


def _control_address(params: TransferParams) -> PrefillAddress:
    host, port = params.remote_host or "", params.remote_port
    if not host:
        raise invalid("kv_transfer_params.remote_host", "kv_transfer_params.remote_host is empty")
    if port is None:
        message = "kv_transfer_params.remote_port is required where remote_host is given"
        raise invalid("kv_transfer_params.remote_port", message, code="missing_field")
    return PrefillAddress("control", host, _port("kv_transfer_params.remote_port", port), params.remote_engine_id or "")


def _bootstrap_address(params: TransferParams) -> PrefillAddress:
    field = "kv_transfer_params.remote_bootstrap_addr"
    text = params.remote_bootstrap_addr
    if text is None:
        message = "kv_transfer_params.remote_host and remote_port are missing, and so is remote_bootstrap_addr"
        raise invalid("kv_transfer_params.remote_host", message, code="missing_field")
    host = port = None
    with suppress(ValueError):
        if len(text) <= MAX_ADDRESS_CHARS:  # urlsplit() remembers what it was given last
            parts = urlsplit(text if "//" in text else f"//{text}")
            host, port = parts.hostname, parts.port
    if not host:
        raise invalid(field, f"{field} is {shown(text)!r}; it has to be like http://HOST:PORT")
    return PrefillAddress(
        "http", host, _port(field, BOOTSTRAP_PORT if port is None else port), params.remote_engine_id or ""
    )


def _http_address(host: str | None, port: int) -> PrefillAddress | None:
    if host == NO_TRANSFER_HOST:
        return None
    if not host:
        message = "bootstrap_host is required where bootstrap_room is given"
        raise invalid("bootstrap_host", message, code="missing_field")
    return PrefillAddress("http", host, _port("bootstrap_port", port))


def _port(field: str, port: int) -> int:
    if not 1 <= port <= 65535:
        raise invalid(field, f"{field} is {port}; it has to be from 1 to 65535")
    return port


def _name(field: str, given: str, limit: int = MAX_NAME_CHARS) -> str:
    if not 1 <= len(given) <= limit:
        field = f"kv_transfer_params.{field}"
        raise invalid(field, f"{field} has {len(given)} characters; 1 to {limit} are allowed")
    return given
