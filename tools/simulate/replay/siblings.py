"""Prefixes that a replica of a replay fetches from its siblings before it computes a prompt.

Chosen is by the code of prefill servers (headrace.server.routing.prefix_choice), fetched by both Schedulers. The
transfer takes what the sibling's link takes, beside what its decode peers fetch.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import PrefillUp
from headrace.core.messages.replies import RequestFailed, RequestFinished
from headrace.core.messages.stage_events import KvReceived, ReceivePrepared
from headrace.core.types.errors import PREFILL_FAILED, ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import PREFIX, FetchFrom, FirstToken, SamplingParams
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.scheduler import Event, Scheduler
from headrace.server.routing.handoff_cost import HandoffCost
from headrace.server.routing.prefix_choice import PrefixChoice, choose_sibling, worth_asking
from headrace.testing.world import World

SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


class Sibling(Protocol):
    """Another replica, as it is asked for prefixes."""

    def cached_tokens(self, prompt: bytes) -> int:
        """Leading tokens that it has cached."""
        ...

    def hand_over(
        self,
        rid: str,
        prompt: bytes,
        peer: str,
        reservation: Reservation,
        handed_over: Callable[[RequestFinished | RequestFailed], None],
    ) -> None:
        """Send what it has cached to a peer that has joined."""
        ...


class SiblingFetches:
    """Fetches prefixes for one replica, which is a peer of this name to its siblings."""

    def __init__(
        self,
        world: World,
        name: str,
        scheduler: Scheduler,
        ranks: tuple[int, ...],
        page_size: int,
        siblings: Mapping[str, Sibling],
        handle: Callable[[Event], None],
    ) -> None:
        """siblings: by name. ranks: of the replica's stages. handle: takes the replica's events."""
        self._world = world
        self._name = name
        self._scheduler = scheduler
        self._ranks = ranks
        self._page_size = page_size
        self._siblings = siblings
        self._handle = handle
        self._costs = {name: HandoffCost() for name in siblings}
        self._waiting: dict[str, Callable[[], None]] = {}  # prompts that go on when a fetch has ended, by its rid
        self._prompts: dict[str, bytes] = {}
        self._serials: dict[str, int] = {}
        self._number = 0
        geometry = Geometry("float32", 1, 1, 1, page_size)
        for sibling in siblings:
            terms = PrefillTerms(
                session=f"{sibling} to {name}", endpoints=("modelled",), geometries=(geometry,), window_bytes=1 << 30
            )
            handle(AddPrefill(name=sibling, endpoint=""))
            handle(PrefillUp(name=sibling, terms=terms))

    def bring(self, prompt: bytes, go_on: Callable[[], None]) -> None:
        """Call go_on when what is worth fetching has come, or is late; at once where nothing is."""
        length = len(prompt) // ITEM_BYTES
        usable = (length - 1) // self._page_size * self._page_size
        cached = self._scheduler.cached_tokens(prompt)
        _, per_token, trusted, _ = self._scheduler.load(self._world.now)
        cost = per_token if trusted else None
        if not worth_asking(cost, cached, usable):
            go_on()
            return
        found = {name: min(usable, sibling.cached_tokens(prompt)) for name, sibling in self._siblings.items()}
        choice = choose_sibling(cost, cached, found, lambda name, tokens: self._costs[name].seconds(tokens))
        if choice is None:
            go_on()
        else:
            self._fetch(choice, choice.tokens - cached, prompt[: choice.tokens * ITEM_BYTES], go_on)

    def prepare(self, order: PrepareReceive) -> None:
        """The stages are ready at once."""
        self._serials[order.ticket] = order.request
        for stage in self._ranks:
            self._later(ReceivePrepared(stage=stage, request=order.request))

    def reserved(self, reservation: Reservation) -> None:
        """Pages are reserved: the sibling is asked to send what it has."""
        rid = reservation.ticket
        route, prompt = rid.partition(" ")[0], self._prompts[rid]
        peer = f"{route} to {self._name}"
        self._siblings[route].hand_over(rid, prompt, peer, reservation, lambda end: self._arrived(rid, end))

    def ended(self, rid: str) -> bool:
        """A request has ended; False if it is no fetch."""
        if rid not in self._prompts:
            return False
        del self._prompts[rid]
        self._serials.pop(rid, None)
        if (go_on := self._waiting.pop(rid, None)) is not None:
            self._world.at(self._world.now, go_on)
        return True

    def _fetch(self, choice: PrefixChoice, tokens: int, prompt: bytes, go_on: Callable[[], None]) -> None:
        self._number += 1
        rid, began = f"{choice.server} {self._name} {self._number}", self._world.now

        def timed() -> None:
            self._costs[choice.server].observe(tokens, self._world.now - began)
            go_on()

        self._waiting[rid], self._prompts[rid] = timed, prompt
        route = FetchFrom(choice.server, rid, prefix=True)
        self._world.at(began + choice.deadline_s, lambda: self._late(rid))
        self._handle(Submit(rid=rid, prompt=prompt, sampling=SAMPLING, route=route))

    def _late(self, rid: str) -> None:
        if rid in self._waiting:
            self._handle(Abort(rid=rid))

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
