"""How the ranks of servers that share experts (--dp-external) find each other: a meeting at a store before each group.

    rank 0      serves the store at HOST:PORT, waits until every rank registers again and again, and admits them
    rank 1 …    connects, compares its terms with rank 0's, and registers again and again until it is admitted

A store belongs to one process of rank 0, and to the one group that it forms. When a rank of any server ends, the
collectives of all others break, their processes end, and the next ones meet at the next store.
"""

import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public in torch.distributed, but typed here only

from headrace.core.config import StageConfig
from headrace.core.runtime.rate_limit import Backoff
from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.external import ExternalMember
from headrace.core.version import headrace_version
from headrace.engine.load_plan import model_terms
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.fingerprint import fingerprint

log = logging.getLogger(__name__)

FORMING_S = 60.0  # longest time of an admitted group to connect
STORE_TIMEOUT_S = 30.0  # of one operation of the store
REPEAT_S = 0.25  # between registrations of a rank
FRESH_S = 2.0  # a registration that was not repeated for so long is that of a process that has ended
LOG_S = 30.0
ADMITTED = "admitted"

T = TypeVar("T")
Terms = Mapping[str, str]
"""What all ranks must have in common, by the flag that sets it."""


def listen(host: str, port: int) -> int | None:
    """A listening socket for the store on this address only; by itself the store would listen on every interface.

    None for a host name: it may resolve to another address on its own machine than on others. Raises OSError.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()


def common_terms(config: StageConfig) -> dict[str, str]:
    """Values by the flag that sets them, as text. Raises ConfigError for a model that cannot be read."""
    model, engine = config.model, config.engine
    terms = model_terms(model, engine)
    spec, computation = terms.spec, terms.computation
    return {
        "the version of Headrace": headrace_version(),
        "the model of --model": fingerprint(spec, open_checkpoint(terms.source, spec), model.quantize, terms.length)[
            :12
        ],
        "--dtype": computation.dtype,
        "--quantize": model.quantize,
        "the dtype of hidden states": computation.compute_dtype,
        "--device": computation.device.partition(":")[0],
        "--max-model-len": str(model.max_model_len),
        "--page-size": str(engine.page_size),
        "--chunk-tokens": str(engine.pass_tokens),
        "--chunking": "dynamic" if config.measure_tokens else "fixed",
        "SIZE of --dp-external": str(config.shared_layout.dp),
        "--tp": str(config.layout.tp),
        "--exchange": engine.exchange,
        "--dp-sync": config.dp_sync,
        "--links": config.links,
        "rules of a pass": msgspec.json.encode(config.rules).decode(),
    }


class MemberRegistration(msgspec.Struct, frozen=True):
    """A rank that waits for the others."""

    incarnation: str
    """Random, of its process."""
    beat: int
    """Counts the repetitions."""
    terms: dict[str, str]


class MemberAdmission(msgspec.Struct, frozen=True):
    """The group is complete."""

    incarnations: tuple[str, ...]
    """Of the process of every rank."""


class Attendance:
    """Which ranks are there, as rank 0 sees it. Pure."""

    def __init__(self, ranks: int) -> None:
        """ranks: of the group, rank 0 included."""
        self._others = range(1, ranks)
        self._seen: dict[int, tuple[MemberRegistration, float]] = {}  # with the time of the last change

    def see(self, rank: int, registration: MemberRegistration, now: float) -> None:
        """Take note of what a rank has registered."""
        known = self._seen.get(rank)
        if known is None or known[0] != registration:
            self._seen[rank] = (registration, now)

    def missing(self, now: float) -> list[int]:
        """Ranks that have not registered, or whose process has ended."""
        return [rank for rank in self._others if rank not in self._seen or now - self._seen[rank][1] > FRESH_S]

    def incarnations(self) -> tuple[str, ...]:
        """Of all other ranks, once none is missing."""
        return tuple(self._seen[rank][0].incarnation for rank in self._others)


def meet(config: StageConfig, terms: Terms) -> PrefixStore:
    """Wait until all ranks of all servers are there. Returns the store of their group.

    Raises ConfigError where the store cannot be served here, for terms that differ from rank 0's, and where another
    process has the place of this one.
    """
    assert config.member is not None
    visitor = _Visitor(config, config.member, dict(terms))
    return visitor.host() if config.shared_rank == 0 else visitor.visit()


class _Visitor:
    """One process at the meeting."""

    def __init__(self, config: StageConfig, member: ExternalMember, terms: dict[str, str]) -> None:
        self._config = config
        self._member = member
        self._rank = config.shared_rank
        self._mine = MemberRegistration(secrets.token_hex(8), 0, terms)
        self._logged_at = time.monotonic() - LOG_S + 1.0  # the first line, after a second
        self._pauses = Backoff(REPEAT_S, FRESH_S)

    def host(self) -> PrefixStore:
        """Serve the store, and admit the others."""
        member, size = self._member, len(self._config.shared_layout.ranks)
        try:
            store = TCPStore(
                member.host, member.port, size, is_master=True, timeout=timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False, master_listen_fd=listen(member.host, member.port),
            )  # fmt: skip
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"--dp-external {member}: server 0 cannot listen at {member.address}: {error}; write an address of "
                "this machine with a free port, and a rank of its own for each server"
            ) from error
        attendance = Attendance(size)
        self._register(store)
        while True:
            for rank in range(1, size):
                if (found := _read(store, _key(rank), MemberRegistration)) is not None:
                    attendance.see(rank, found, time.monotonic())
            if not (missing := attendance.missing(time.monotonic())):
                break
            self._say(f"waiting for {self._names(missing)} of {size // self._config.layout.tp}")
            time.sleep(REPEAT_S)
        store.set(ADMITTED, _text(MemberAdmission((self._mine.incarnation, *attendance.incarnations()))))
        return self._group(store, self._mine.incarnation)

    def visit(self) -> PrefixStore:
        """Register at the store until rank 0 admits this process."""
        while True:
            try:
                return self._stay(self._connect())
            except RuntimeError as error:  # of a store that is gone, with the process of rank 0
                log.debug("the store is gone: %s", error)
                time.sleep(self._pauses.next_delay())

    def _connect(self) -> TCPStore:
        member = self._member
        while True:
            try:
                socket.create_connection((member.host, member.port), STORE_TIMEOUT_S).close()  # TCPStore logs every try
            except OSError as error:
                self._say(f"waiting for server 0 at {member.address} ({error})")
                time.sleep(self._pauses.next_delay())
                continue
            timeout = timedelta(seconds=STORE_TIMEOUT_S)
            return TCPStore(member.host, member.port, is_master=False, timeout=timeout, wait_for_workers=False)

    def _stay(self, store: TCPStore) -> PrefixStore:
        hosting = msgspec.json.decode(store.get(_key(0)), type=MemberRegistration)  # waits for it
        self._compare(hosting.terms)
        self._take_place(store)
        while True:
            self._register(store)
            admission = _read(store, ADMITTED, MemberAdmission)
            if admission is not None and admission.incarnations[self._rank] == self._mine.incarnation:
                return self._group(store, hosting.incarnation)
            if admission is not None:
                self._say("waiting for the end of the group that has begun without this server")
            else:
                self._say("waiting for the other servers")
            time.sleep(REPEAT_S)

    def _take_place(self, store: TCPStore) -> None:
        """Raises ConfigError when another process repeats a registration as this rank."""
        before = _read(store, _key(self._rank), MemberRegistration)
        if before is None:
            return
        time.sleep(FRESH_S)
        if _read(store, _key(self._rank), MemberRegistration) != before:
            raise ConfigError(
                f"--dp-external {self._member}: another server is there as {self._member.rank}; give each server a "
                f"rank of its own, from 0 to {self._member.size - 1}"
            )

    def _compare(self, terms: Terms) -> None:
        mine = self._mine.terms
        differing = [
            f"{name} is {mine.get(name, 'not known')} here and {terms.get(name, 'not known')} there"
            for name in sorted({*terms, *mine})
            if terms.get(name) != mine.get(name)
        ]
        if differing:
            raise ConfigError(
                f"--dp-external {self._member}: server {self._member.rank} does not fit server 0: "
                f"{'; '.join(differing)}; all servers of a group need the same"
            )

    def _register(self, store: TCPStore) -> None:
        self._mine = msgspec.structs.replace(self._mine, beat=self._mine.beat + 1)
        store.set(_key(self._rank), _text(self._mine))

    def _group(self, store: TCPStore, name: str) -> PrefixStore:
        return PrefixStore(f"headrace-{name}", store)

    def _names(self, ranks: list[int]) -> str:
        servers = sorted({self._config.shared_layout.place(rank).replica for rank in ranks})
        return f"server{'s' if len(servers) > 1 else ''} " + " and ".join(map(str, servers))

    def _say(self, text: str) -> None:
        """Log what is waited for, now and then."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.info("--dp-external %s: %s", self._member, text)


def _key(rank: int) -> str:
    return f"rank-{rank}"


def _text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def _read(store: TCPStore, key: str, kind: type[T]) -> T | None:
    """What a rank has written under a key; None where nothing is."""
    return msgspec.json.decode(store.get(key), type=kind) if store.check([key]) else None
