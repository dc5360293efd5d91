"""How other programs' requests name the KV to hand over: tickets at a prefill server, origins at a decode server.

A request may be for several prompts, and for several choices of each. Each pair of a prompt and a choice is a job with
a ticket of its own, counted prompt by prompt. HandoffParams that a router gives once for all of them are numbered:
"name" for a sole job, "name/0", "name/1", ... for several. A bootstrap room R is the name "room:R".
"""

from collections.abc import Sequence
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from headrace.core.types.errors import HeadraceError, invalid

NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's name for "nobody fetches this"
BOOTSTRAP_PORT = 8998  # where SGLang and Mooncake ask when nobody says otherwise
MAX_TICKET_CHARS = 256
MAX_NAME_CHARS = 240  # leaves room for the number
MAX_ROOM = (1 << 64) - 1

T = TypeVar("T")


class TransferParams(msgspec.Struct, kw_only=True):
    """kv_transfer_params, as far as they mean something here: NIXL's and Mooncake's names, and ours (the tickets)."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_bootstrap_addr: str | None = None
    ticket: str | None = None
    tickets: list[str] | None = None
    prompt_token_ids: list[int | list[int]] | None = None


class HandoffParams(msgspec.Struct, kw_only=True):
    """The fields of a request body that name a handoff."""

    kv_transfer_params: TransferParams | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class Jobs(msgspec.Struct, frozen=True):
    """What a request is for."""

    prompts: int
    choices: int

    @property
    def count(self) -> int:
        return self.prompts * self.choices


class HandOver(msgspec.Struct, frozen=True):
    """How a prefill server gives a job's KV away. ticket None: nobody fetches it. hold: answer when it is computed,
    and keep it for a peer; the client's limits are not known yet."""

    ticket: str | None
    hold: bool = False


class Address(msgspec.Struct, frozen=True):
    """Where a request says that a prefill server is: its control endpoint, or an HTTP port that tells where the
    control endpoint is. engine: the instance id of the server, "" where it is not told."""

    kind: Literal["control_server", "http"]
    host: str
    port: int
    engine: str = ""


class KvSource(msgspec.Struct, frozen=True):
    """Where a decode server finds a job's KV. address None: nowhere, since nothing is transferred. wait: the prompt may
    still be on its way to the prefill server. held: it was computed without knowing the client's limits and stops."""

    address: Address | None
    ticket: str
    wait: bool = True
    held: bool = False


def hand_overs(names: HandoffParams, jobs: Jobs, minted: str) -> list[HandOver] | None:
    """What a prefill server is to do, one for each job; None if the body names no handoff. minted: a fresh name. Raises
    HeadraceError (400)."""
    params = names.kv_transfer_params
    if params is not None and params.do_remote_prefill:
        message = "kv_transfer_params.do_remote_prefill asks a decode server; this is a prefill server"
        raise invalid("kv_transfer_params.do_remote_prefill", message)
    if params is not None and params.do_remote_decode:
        _one_kind(names)
        name = minted if params.transfer_id is None else _name("transfer_id", params.transfer_id)
        return [HandOver(ticket, hold=True) for ticket in numbered(name, jobs.count)]
    if not _names_rooms(names):
        return None
    hosts = _spread("bootstrap_host", names.bootstrap_host, jobs)
    return [
        HandOver(None if host == NO_TRANSFER_HOST else ticket)
        for host, ticket in zip(hosts, _rooms(names, jobs), strict=True)
    ]


def origins(names: HandoffParams, jobs: Jobs, default_port: int) -> list[KvSource] | None:
    """Where a decode server finds the KV of each job; None if the body does not say. Raises HeadraceError (400)."""
    params = names.kv_transfer_params
    if params is not None and params.do_remote_decode:
        message = "kv_transfer_params.do_remote_decode asks a prefill server; this server decodes"
        raise invalid("kv_transfer_params.do_remote_decode", message)
    if params is not None and params.do_remote_prefill:
        _one_kind(names)
        address = _bootstrap_address(params) if params.remote_host is None else _control_address(params)
        waits = params.remote_host is None
        return [KvSource(address, ticket, wait=waits, held=True) for ticket in _tickets(params, jobs.count)]
    if not _names_rooms(names):
        return None
    hosts = _spread("bootstrap_host", names.bootstrap_host, jobs)
    ports = _spread("bootstrap_port", names.bootstrap_port, jobs)
    return [
        KvSource(_http_address(host, port or default_port), ticket)
        for host, port, ticket in zip(hosts, ports, _rooms(names, jobs), strict=True)
    ]


def numbered(name: str, count: int) -> list[str]:
    """The tickets of so many jobs that share a name."""
    return [name] if count == 1 else [f"{name}/{index}" for index in range(count)]


def _one_kind(names: HandoffParams) -> None:
    if names.bootstrap_room is not None:
        message = "kv_transfer_params and bootstrap_room name two different handoffs; send one of them"
        raise invalid("bootstrap_room", message)


def _names_rooms(names: HandoffParams) -> bool:
    """Raises HeadraceError (400) for a host without a room."""
    if names.bootstrap_room is None and names.bootstrap_host is not None:
        message = "bootstrap_room is required where bootstrap_host is given"
        raise invalid("bootstrap_room", message, code="missing_field")
    return names.bootstrap_room is not None


def _rooms(names: HandoffParams, jobs: Jobs) -> list[str]:
    """A ticket for each job, from one room for all of them, one for each prompt, or one for each job."""
    given = names.bootstrap_room
    rooms = given if isinstance(given, list) else [given or 0]
    for index, room in enumerate(rooms):
        if not 0 <= room <= MAX_ROOM:
            field = f"bootstrap_room[{index}]" if isinstance(given, list) else "bootstrap_room"
            raise invalid(field, f"{field} is {room}; it has to be from 0 to {MAX_ROOM}")
    if not isinstance(given, list):
        return numbered(f"room:{given}", jobs.count)
    if len(given) == jobs.count:
        return [f"room:{room}" for room in given]
    if len(given) == jobs.prompts:
        return [ticket for room in given for ticket in numbered(f"room:{room}", jobs.choices)]
    raise _wrong_length("bootstrap_room", len(given), jobs)


def _spread(field: str, given: T | list[T | None] | None, jobs: Jobs) -> list[T | None]:
    """One value for each job."""
    if not isinstance(given, list):
        return [given] * jobs.count
    if len(given) == jobs.count:
        return given
    if len(given) == jobs.prompts:
        return [value for value in given for _ in range(jobs.choices)]
    raise _wrong_length(field, len(given), jobs)


def _wrong_length(field: str, length: int, jobs: Jobs) -> HeadraceError:
    wanted = f"{jobs.prompts}" if jobs.choices == 1 else f"{jobs.prompts} or {jobs.count}"
    message = f"{field} has {length} entries and the request has {jobs.prompts} prompts; send {wanted} or one value"
    return invalid(field, message)


def _tickets(params: TransferParams, count: int) -> list[str]:
    if params.tickets is not None:
        if len(params.tickets) != count:
            message = f"kv_transfer_params.tickets has {len(params.tickets)} entries; this request needs {count}"
            raise invalid("kv_transfer_params.tickets", message)
        return [_name(f"tickets[{index}]", ticket, MAX_TICKET_CHARS) for index, ticket in enumerate(params.tickets)]
    if params.transfer_id is not None:
        return numbered(_name("transfer_id", params.transfer_id), count)
    field = "ticket" if params.ticket is not None else "remote_request_id"
    name = params.ticket or params.remote_request_id
    if name is None:
        message = "kv_transfer_params.ticket is missing, and so are tickets, transfer_id and remote_request_id"
        raise invalid("kv_transfer_params.ticket", message, code="missing_field")
    if count > 1:
        message = f"this request needs {count} tickets; send them in kv_transfer_params.tickets"
        raise invalid("kv_transfer_params.tickets", message, code="missing_field")
    return [_name(field, name, MAX_TICKET_CHARS)]


def _control_address(params: TransferParams) -> Address:
    host, port = params.remote_host or "", params.remote_port
    if not host:
        raise invalid("kv_transfer_params.remote_host", "kv_transfer_params.remote_host is empty")
    if port is None:
        message = "kv_transfer_params.remote_port is required where remote_host is given"
        raise invalid("kv_transfer_params.remote_port", message, code="missing_field")
    return Address("control_server", host, _port("kv_transfer_params.remote_port", port), params.remote_engine_id or "")


def _bootstrap_address(params: TransferParams) -> Address:
    field = "kv_transfer_params.remote_bootstrap_addr"
    text = params.remote_bootstrap_addr
    if text is None:
        message = "kv_transfer_params.remote_host and remote_port are missing, and so is remote_bootstrap_addr"
        raise invalid("kv_transfer_params.remote_host", message, code="missing_field")
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise invalid(field, f"{field} is {text!r}; it has to be like http://HOST:PORT")
    return Address("http", host, _port(field, BOOTSTRAP_PORT if port is None else port), params.remote_engine_id or "")


def _http_address(host: str | None, port: int) -> Address | None:
    if host == NO_TRANSFER_HOST:
        return None
    if not host:
        message = "bootstrap_host is required where bootstrap_room is given"
        raise invalid("bootstrap_host", message, code="missing_field")
    return Address("http", host, _port("bootstrap_port", port))


def _port(field: str, port: int) -> int:
    if not 1 <= port <= 65535:
        raise invalid(field, f"{field} is {port}; it has to be from 1 to 65535")
    return port


def _name(field: str, given: str, limit: int = MAX_NAME_CHARS) -> str:
    if not 1 <= len(given) <= limit:
        field = f"kv_transfer_params.{field}"
        raise invalid(field, f"{field} has {len(given)} characters; 1 to {limit} are allowed")
    return given


def prompt_ids(names: HandoffParams, prompts: int) -> Sequence[list[int]] | None:
    """The token ids that the prefill server says it computed, one list for each prompt; None if it does not say, or
    of another number of prompts."""
    params = names.kv_transfer_params
    given = params.prompt_token_ids if params is not None and params.do_remote_prefill else None
    if not given:
        return None
    lists = [item for item in given if isinstance(item, list)]
    flat = [item for item in given if isinstance(item, int)]
    found = [flat] if len(flat) == len(given) else lists
    return found if len(found) == prompts else None
