"""Prefixes that move between servers of a replay: one server fetches what another one has cached.

    fetch ─► Submit(FetchFrom.prefix) ─► reserved ─► the holder's Submit(SendTo.cached) ─► KV is here, and published

Both ends are real Schedulers. The transfer takes what the holder's link takes, beside what else is fetched from it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import PrefillUp
from headrace.core.messages.replies import RequestFailed, RequestFinished
from headrace.core.messages.stage_events import KvReceived, ReceivePrepared
from headrace.core.types.errors import PREFILL_FAILED, ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import PREFIX, FetchFrom, FirstToken, SamplingParams, SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Event
from headrace.testing.world import World
from headrace.tools.simulate.replay.terms import whose

SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)

HandedOver = Callable[[RequestFinished | RequestFailed], None]


class PrefixHolder(Protocol):
    """Another server, as prefixes are fetched from it."""

    def join(self, peer: str) -> None:
        """A server begins a session, which has its name."""

    def hand_over(self, submit: Submit, peer: str, reservation: Reservation, handed_over: HandedOver) -> None:
        """Send what is cached of a prompt to a server that has joined. handed_over: called when it is there, or has
        failed."""


class _Fetch(NamedTuple):
    """One that has not ended."""

    holder: str
    prompt: bytes
    terms: RequestTerms
    ended: Callable[[bool], None]


class ReplayFetches:
    """Fetches prefixes for one server, of this name."""

    def __init__(
        self, world: World, name: str, ranks: tuple[int, ...], page_size: int, handle: Callable[[Event], None]
    ) -> None:
        """ranks: of the server's stages. handle: takes its events."""
        self._world = world
        self._name = name
        self._ranks = ranks
        self._page_size = page_size
        self._handle = handle
        self._holders: dict[str, PrefixHolder] = {}
        self._waiting: dict[str, _Fetch] = {}  # by rid
        self._serials: dict[str, int] = {}
        self._number = 0

    def connect(self, name: str, holder: PrefixHolder) -> None:
        """Prefixes may be fetched from this server from now on."""
        self._holders[name] = holder
        holder.join(self._peer(name))
        pools = (Geometry("float32", 1, 1, 1, self._page_size),)
        terms = PrefillTerms(session=self._peer(name), endpoints=("modelled",), geometries=pools, window_bytes=1 << 30)
        self._handle(AddPrefill(name=name, endpoint=""))
        self._handle(PrefillUp(name=name, terms=terms))

    def fetch(
        self, name: str, prompt: bytes, terms: RequestTerms, deadline_s: float, ended: Callable[[bool], None]
    ) -> str:
        """Fetch the KV of these tokens. terms: whose they are, and how long they are retained. ended: called with
        whether it has come, at the deadline at the latest. Returns the name under which it is cancelled."""
        self._number += 1
        rid = f"{name} {self._name} {self._number}"
        self._waiting[rid] = _Fetch(name, prompt, terms, ended)
        self._world.at(self._world.now + deadline_s, lambda: self.cancel(rid))
        route = FetchFrom(name, rid, prefix=True)
        self._handle(Submit(rid=rid, prompt=prompt, sampling=SAMPLING, route=route, terms=terms))
        return rid

    def cancel(self, rid: str) -> None:
        """End a fetch, if it has not ended."""
        if rid in self._waiting:
            self._handle(Abort(rid=rid))

    def prepare(self, order: PrepareReceive) -> None:
        """The stages are ready at once."""
        self._serials[order.ticket] = order.request
        for stage in self._ranks:
            self._later(ReceivePrepared(stage=stage, request=order.request))

    def reserved(self, reservation: Reservation) -> None:
        """Pages are reserved: the holder is asked to send what it has."""
        rid = reservation.ticket
        name, prompt, terms, _ = self._waiting[rid]
        submit = Submit(rid=rid, prompt=prompt, sampling=SAMPLING, route=SendTo(rid, cached=True), terms=whose(terms))
        self._holders[name].hand_over(submit, self._peer(name), reservation, lambda end: self._arrived(rid, end))

    def ended(self, end: RequestFinished | RequestFailed) -> bool:
        """A request has ended; False if it is no fetch."""
        if end.rid not in self._waiting:
            return False
        fetch = self._waiting.pop(end.rid)
        self._serials.pop(end.rid, None)
        self._world.at(self._world.now, lambda: fetch.ended(isinstance(end, RequestFinished)))
        return True

    def _peer(self, name: str) -> str:
        """What this server is called at a holder."""
        return f"{name} to {self._name}"

    def _arrived(self, rid: str, end: RequestFinished | RequestFailed) -> None:
        if rid not in self._serials:
            return  # it was late
        if isinstance(end, RequestFailed):
            error = ErrorInfo(code=PREFILL_FAILED, message=end.error.message, status=502, at_prefill=True)
            self._later(Abort(rid=rid, error=error))
            return
        tokens = end.usage.prompt_tokens
        first = FirstToken(0, tokens, tokens, finish_reason=PREFIX)
        for stage in self._ranks:
            self._later(KvReceived(stage=stage, request=self._serials[rid], first=first, bytes=1, chunks=1))

    def _later(self, event: Event) -> None:
        self._world.at(self._world.now, lambda: self._handle(event))
