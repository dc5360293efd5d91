"""One decode server of a replay: a real Scheduler on modelled stages, which decodes what its trace has generated.

    arrival ─► choice of a prefill server ─► Submit ─┬─ decided: there ─► reserved ─► posted ─► KV is here ─► decoding
                                                     └─ decided: here ──► computed between decode rows ─────► decoding

    decoding ─► ended ─► its KV is offered to that prefill server ─► fetched from here, if it is taken (returns.py)

    open prompt ─► its pieces are computed by the prefill server that it will go to; KV comes early (early_kv.py)

Chosen, forecast and decided is by the code of decode servers (headrace.server.routing, core's remote_prefill).
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.kv_events import KvEventMessage
from headrace.core.messages.orders import Order, PlanRow, PrepareReceive
from headrace.core.messages.peers import AskReserve, PeerJoined, PeerReserved, PrefillUp
from headrace.core.messages.replies import PrefillDecided, RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import KvReceived, ReceivePrepared
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import ITEM_BYTES, unpack
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.core.types.requests.kv_return import MAX_OFFERS
from headrace.core.types.requests.request import DecodeHere, FetchFrom, FirstToken, SamplingParams
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.pipeline import TOKEN, TimedHostTier, TimedPipeline
from headrace.server.routing.replica_load import Sent
from headrace.server.routing.replica_router import ReplicaRouter
from headrace.testing.world import SchedulerDriver, World
from headrace.tools.simulate.replay.early_kv import ReplayEarlyKv
from headrace.tools.simulate.replay.prefix_fetches import HandedOver, ReplayFetches
from headrace.tools.simulate.replay.replica import ReplayReplica
from headrace.tools.simulate.replay.routing import REPORTED_S
from headrace.tools.simulate.replay.terms import at_prefill, whose

Remote = Literal["always", "never", "cost"]
REMOTES: tuple[Remote, ...] = get_args(Remote)


class DecodeTier(msgspec.Struct, frozen=True, kw_only=True):
    """Decode servers in front of the prefill servers."""

    remote: Remote
    costs: tuple[Cost, ...]
    """Of each of their stages."""

    servers: int = 1
    chunk_tokens: int
    """Token budget of their forward passes, which prompts share with the requests that decode."""

    read_s: float = 0.0
    """Seconds that a decoding request adds to a forward pass for each token before it, whose KV is read."""

    handoff_s: float = 0.0
    """Seconds that a handoff takes beside the prefill server's own time and its transfer."""

    fetch_tokens_s: float | None = None
    """Tokens a second whose KV leaves each server when it returns; None: at once."""

    returns: bool = False
    """They offer the KV of turns to the prefill servers of the prompts."""

    open: bool = False
    """They have open prompts."""


class DecodedRequest(msgspec.Struct, gc=False):
    """One request at a decode server."""

    text: bytes
    """Packed tokens of the prompt, and of its answer where that is known."""
    prompt_tokens: int
    terms: RequestTerms
    generated: int = 0
    sent: Sent | None = None
    """How the prefill server that is to compute it counts it; None: computed here."""

    serial: int = -1
    """Its number at the stages, once they expect its KV."""

    posted_at: float = 0.0


class ReplayDecodeServer:
    """Takes prompts, and reports what becomes of them at the virtual times at which it does.

    tokens: called with rid whenever a token comes. ended: called with rid, cached tokens, whether a prefill server has
    computed the prompt, and the error, if there was one.
    """

    def __init__(
        self,
        world: World,
        number: int,
        config: SchedulerConfig,
        tier: DecodeTier,
        prefills: Sequence[ReplayReplica],
        tokens: Callable[[str], None],
        ended: Callable[[str, int, float, bool, ErrorInfo | None], None],
    ) -> None:
        """prefills: the prefill servers, which have a peer called "decode-NUMBER" by this."""
        self.name = f"decode-{number}"
        self._world = world
        self._config = msgspec.structs.replace(config, chunk_tokens=tier.chunk_tokens, kv_events=False)
        self._tier = tier
        self._prefills = prefills
        self._numbers = range(len(prefills))
        self._tokens = tokens
        self._ended = ended
        self._served: dict[str, DecodedRequest] = {}
        self._fetched: dict[int, DecodedRequest] = {}  # those with a serial, by it
        self._handed_over: dict[str, HandedOver] = {}  # by rid, of KV that returns
        self._offers = 0
        self._router = ReplicaRouter(len(prefills), random.Random(number))
        self._reported_at = -REPORTED_S
        self._driver = SchedulerDriver(world, Scheduler(self._config), self._perform)
        copies = TimedHostTier(world, len(tier.costs), config.page_size, None, self._driver.handle)
        self.pipeline = TimedPipeline(
            world, tier.costs, tier.fetch_tokens_s, copies, self._driver.handle, tier.read_s, self._sampled
        )
        self.pipeline.start(config.kv_pages, config.page_size, 0)
        ranks = tuple(config.layout.ranks)
        self._fetches = ReplayFetches(world, self.name, ranks, config.page_size, self._driver.handle)
        self._opened: dict[str, ReplayEarlyKv] = {}
        geometry = Geometry("float32", 1, 1, 1, config.page_size)
        for prefill in self._numbers:
            self._router.paged(prefill, config.page_size)
            self._prefills[prefill].join(self.name)
            self._driver.handle(AddPrefill(name=str(prefill), endpoint=""))
            terms = PrefillTerms(
                session=str(prefill), endpoints=("modelled",), geometries=(geometry,), window_bytes=1 << 30
            )
            self._driver.handle(PrefillUp(name=str(prefill), terms=terms))
            if tier.returns:
                self._prefills[prefill].take_returns(self.name, self)
            if tier.open:
                self._fetches.connect(self._prefills[prefill].name, self._prefills[prefill])

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._served)

    def observe(self, prefill: int, event: KvEventMessage) -> None:
        """The prefix cache of a prefill server has changed."""
        self._router.apply(prefill, (event,))

    def join(self, peer: str) -> None:
        """A prefill server begins a session, over which KV returns."""
        pools = (Geometry("float32", 1, 1, 1, self._config.page_size),)
        terms = PeerTerms(session=peer, geometries=pools, window_bytes=1 << 30)
        self._driver.handle(PeerJoined(name=peer, terms=terms))

    def hand_over(self, submit: Submit, peer: str, reservation: Reservation, handed_over: HandedOver) -> None:
        """Send what is cached of a turn to a prefill server that has joined."""
        self._handed_over[submit.rid] = handed_over
        self._driver.handle(PeerReserved(session=peer, reservation=reservation))
        self._driver.handle(submit)

    def change(self, rid: str, prompt: bytes, terms: RequestTerms) -> None:
        """The prompt of a request to come is opened, or has grown to these tokens. The prefill server is chosen when it
        is opened."""
        if rid not in self._opened:
            self._hear_loads()
            sent = self._router.choose(prompt, terms.prefix_salt, self._numbers, self._world.now)
            self._router.done(sent)
            prefill = self._prefills[sent.replica]
            self._opened[rid] = ReplayEarlyKv(
                self._world, rid, prefill, sent.replica, self._fetches, self._config.page_size, self._tier.handoff_s
            )
        self._opened[rid].change(prompt, terms)

    def submit(self, rid: str, text: bytes, prompt_tokens: int, generated: int, terms: RequestTerms) -> None:
        """Take in a request that generates so many tokens. It commits the open prompt of this name, if there is one.
        text: packed tokens of the prompt, and of its answer where that is known."""
        served = self._served[rid] = DecodedRequest(text, prompt_tokens, terms)
        prompt = text[: prompt_tokens * ITEM_BYTES]
        route: DecodeHere | FetchFrom = DecodeHere()
        opened = self._opened.pop(rid, None)
        if opened is not None:
            opened.commit()
        if self._tier.remote != "never":
            now = self._world.now
            self._hear_loads()
            numbers = self._numbers if opened is None else (opened.replica,)
            sent = served.sent = self._router.choose(prompt, terms.prefix_salt, numbers, now)
            compare = self._tier.remote == "cost"
            forecast = self._router.forecast(sent, now) if compare else None
            route = FetchFrom(str(sent.replica), rid, forecast=forecast, compare=compare)
        sampling = SamplingParams(temperature=0.0, max_tokens=generated)
        self._driver.handle(Submit(rid=rid, prompt=prompt, sampling=sampling, route=route, terms=terms))

    def cancel(self, rid: str) -> None:
        """The client of a request gives it up, if it is here and has not ended."""
        if rid in self._served:
            self._driver.handle(Abort(rid=rid))

    def _hear_loads(self) -> None:
        if self._world.now - self._reported_at >= REPORTED_S:
            self._reported_at = self._world.now
            for number, prefill in enumerate(self._prefills):
                self._router.reported(number, prefill.load(), self._world.now, self._world.now)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case PrepareReceive() if effect.ticket in self._served:
                    self._prepare(effect)
                case PrepareReceive():
                    self._fetches.prepare(effect)
                case AskReserve() if effect.reservation.ticket in self._served:
                    self._post(effect.reservation)
                case AskReserve():
                    self._fetches.reserved(effect.reservation)
                case Order():
                    self.pipeline.order(effect)
                case PrefillDecided() if not effect.decision.remote:
                    self._keep(effect.rid)
                case Tokens():
                    self._served[effect.rid].generated += 1
                    self._tokens(effect.rid)
                case RequestFinished() | RequestFailed() if self._fetches.ended(effect):
                    pass
                case RequestFinished() | RequestFailed() if effect.rid in self._handed_over:
                    self._handed_over.pop(effect.rid)(effect)
                case RequestFinished():
                    self._end(effect.rid, effect.usage.cached_tokens, effect.timing.queue_s, None)
                case RequestFailed():
                    self._end(effect.rid, 0, 0.0, effect.error)
                case _:
                    pass

    def _keep(self, rid: str) -> None:
        """The prompt is computed here."""
        served = self._served[rid]
        assert served.sent is not None, "a prefill server was chosen for it"
        self._router.withdraw(served.sent)
        served.sent = None

    def _prepare(self, order: PrepareReceive) -> None:
        """The stages are ready for its KV at once."""
        served = self._served[order.ticket]
        self._fetched.pop(served.serial, None)
        self._fetched[order.request] = served
        served.serial = order.request
        for stage in self._config.layout.ranks:
            event = ReceivePrepared(stage=stage, request=order.request)
            self._world.at(self._world.now, lambda event=event: self._driver.handle(event))  # type: ignore[misc]

    def _post(self, reservation: Reservation) -> None:
        """Pages are reserved: the prompt goes to the prefill server."""
        rid = reservation.ticket
        served = self._served[rid]
        assert served.sent is not None, "it is not computed here"
        served.posted_at = self._world.now
        self._router.posted(served.sent, self._world.now)
        prefill = self._prefills[served.sent.replica]
        prompt = served.text[: reservation.prompt_tokens * ITEM_BYTES]
        arrived = partial(self._arrived, rid)
        self._world.at(
            self._world.now + self._tier.handoff_s,
            lambda: prefill.compute(rid, prompt, at_prefill(served.terms), self.name, reservation, arrived),
        )

    def _arrived(self, rid: str, ended: RequestFinished | RequestFailed) -> None:
        """The prefill server has handed the KV over, or failed the prompt."""
        served = self._served.get(rid)
        if served is None:
            return  # its client has given it up
        assert served.sent is not None, "it is not computed here"
        self._router.done(served.sent)
        if isinstance(ended, RequestFailed):
            error = msgspec.structs.replace(ended.error, at_prefill=True)
            self._world.at(self._world.now, lambda: self._driver.handle(Abort(rid=rid, error=error)))
            return
        usage, timing = ended.usage, ended.timing
        added_s = self._world.now - served.posted_at - timing.queue_s - timing.forward_s
        self._router.handed_over(served.sent, added_s)
        first = FirstToken(_token(served.text, usage.prompt_tokens), usage.prompt_tokens, usage.cached_tokens)
        for stage in self._config.layout.ranks:
            event = KvReceived(stage=stage, request=served.serial, first=first, bytes=1, chunks=1)
            self._world.at(self._world.now, lambda event=event: self._driver.handle(event))  # type: ignore[misc]

    def _end(self, rid: str, cached_tokens: int, queue_s: float, error: ErrorInfo | None) -> None:
        served = self._served.pop(rid)
        self._fetched.pop(served.serial, None)
        if served.sent is not None:
            self._router.done(served.sent)
            if self._tier.returns and error is None:
                self._offer(served, self._prefills[served.sent.replica])
        self._ended(rid, cached_tokens, queue_s, served.sent is not None, error)

    def _offer(self, served: DecodedRequest, prefill: ReplayReplica) -> None:
        """Offer the KV of a turn, as KvReturns does: what has filled a page since its prompt and is still here."""
        computed = served.text[: (served.prompt_tokens + served.generated) * ITEM_BYTES]  # but for the last token
        terms = whose(served.terms)
        cached = self._driver.scheduler.cached_tokens(computed, terms.prefix_salt)
        if self._offers >= MAX_OFFERS or cached <= served.prompt_tokens:
            return
        self._offers += 1
        self._world.at(
            self._world.now + self._tier.handoff_s,
            lambda: prefill.returns.offer(self.name, computed[: cached * ITEM_BYTES], terms, self._offered),
        )

    def _offered(self) -> None:
        self._offers -= 1

    def _sampled(self, row: PlanRow) -> int:
        served = self._fetched.get(row.request)
        return TOKEN if served is None else _token(served.text, row.start + row.count)


def _token(text: bytes, position: int) -> int:
    """The token at this position, if the answer is known."""
    found = unpack(text[position * ITEM_BYTES : (position + 1) * ITEM_BYTES])
    return found[0] if found else TOKEN
