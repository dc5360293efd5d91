"""One replica of a replay: a real Scheduler on modelled stages, its clients and its decode peer."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from headrace.core.config import SchedulerConfig
from headrace.core.messages.forecasts import ForecastMade, MakeForecast
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventMessage, ReplicaKvEvent
from headrace.core.messages.orders import Order, PrepareReceive
from headrace.core.messages.peers import AskReserve, PeerJoined, PeerReserved
from headrace.core.messages.replies import PrefixReply, Progress, RequestFailed, RequestFinished, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.packed import ITEM_BYTES, pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.request import Discard, Promise, SamplingParams, SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.row_costs import row_seconds
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.forecast import Copied, make_forecast
from headrace.scheduler.twin.pipeline import TimedHostTier, TimedPipeline
from headrace.server.routing.replica_load import LoadReport
from headrace.server.routing.score import Candidate
from headrace.testing.world import SchedulerDriver, World
from headrace.tools.simulate.replay.costs import slowest
from headrace.tools.simulate.replay.open_prompts import ReplayOpenPrompts
from headrace.tools.simulate.replay.prefix_fetches import HandedOver, PrefixHolder, ReplayFetches
from headrace.tools.simulate.replay.returns import ReplayReturns
from headrace.tools.simulate.replay.siblings import SiblingFetches

PEER = "peer"
NO_TERMS = RequestTerms()
ANSWERED = SamplingParams(temperature=0.0, max_tokens=1)
STEP_S = 1e-4  # of CPU, that a step of a forecast takes
HANDED_OVER = SamplingParams(temperature=0.0, max_tokens=2)  # a request of one token hands no KV over


class HostTier(NamedTuple):
    """Host tier of each replica."""

    pages: int = 0
    """0: none."""

    tokens_s: float | None = None
    """Tokens a second whose KV is copied to it and from it; None: at once."""


class ReplayReplica:
    """Takes prompts and reports what becomes of them, at the virtual times at which it does.

    first_token: called with rid. ended: called with rid, cached tokens, seconds in the queue and the error, if there
    was one. cached: called with what the prefix cache gained or lost, if the configuration has kv_events.
    """

    def __init__(
        self,
        world: World,
        name: str,
        config: SchedulerConfig,
        costs: Sequence[Cost],
        fetch_tokens_s: float | None,
        host: HostTier,
        first_token: Callable[[str], None],
        ended: Callable[[str, int, float, ErrorInfo | None], None],
        cached: Callable[[KvEventMessage], None] = lambda _event: None,
        *,
        cancels: bool = False,
        slowed: Callable[[], float] = lambda: 1.0,
        copied: Copied | None = None,
        promise: Callable[[str, Promise], None] = lambda _rid, _promise: None,
    ) -> None:
        """fetch_tokens_s, slowed: as in TimedPipeline; None: KV is dropped when its prompt is computed. cancels: its
        stages can give a pass up. copied: makes the copies of forecasts; None: none are made. promise: called with what
        became of the promise of a request."""
        self._world = world
        self.name = name
        self._config = config
        self._cost = slowest(costs, config.chunk_tokens)
        self._hands_over = fetch_tokens_s is not None
        self._first_token = first_token
        self._ended = ended
        self._cached = cached
        self._copied = copied
        self._promise = promise
        self._scheduler = Scheduler(config)
        self._driver = SchedulerDriver(world, self._scheduler, self._perform)
        self._handed_over: dict[str, HandedOver] = {}  # by rid, of decode servers and siblings in the replay
        self._siblings: SiblingFetches | None = None
        ranks = tuple(config.layout.ranks)
        self._fetches = ReplayFetches(world, name, ranks, config.page_size, self._driver.handle)
        self.returns = ReplayReturns(world, config.page_size, self._fetches, self._driver.handle)
        """KV that decode servers offer back."""

        self.open_prompts = ReplayOpenPrompts(world, config.page_size, self._driver.handle)
        """Prompts that are to be submitted when they are complete."""

        self._work: dict[str, float] = {}  # predicted seconds of requests without a first token
        self._queued_s = 0.0
        copies = TimedHostTier(world, len(costs), config.page_size, host.tokens_s, self._driver.handle)
        self.pipeline = TimedPipeline(world, costs, fetch_tokens_s, copies, self._driver.handle, slowed=slowed)
        self.pipeline.start(config.kv_pages, config.page_size, host.pages, cancels=cancels)
        if self._hands_over:
            self.join(PEER)

    @property
    def open_requests(self) -> int:
        """Requests without a first token."""
        return len(self._work)

    def connect(self, siblings: Mapping[str, "ReplayReplica"]) -> None:
        """Fetch prefixes from these siblings from now on."""
        for name, sibling in siblings.items():
            self._fetches.connect(name, sibling)
        self._siblings = SiblingFetches(self._world, self._scheduler, self._config.page_size, siblings, self._fetches)

    def take_returns(self, name: str, server: PrefixHolder) -> None:
        """This decode server may offer KV from now on."""
        self._fetches.connect(name, server)

    def prefix(self, prompt: bytes, salt: str) -> PrefixReply:
        """What its prefix cache has of a prompt."""
        return self._scheduler.prefix(prompt, salt)

    def hand_over(self, submit: Submit, peer: str, reservation: Reservation, handed_over: HandedOver) -> None:
        """Send what is cached to another server that has joined. handed_over: as of compute()."""
        self._handed_over[submit.rid] = handed_over
        self._driver.handle(PeerReserved(session=peer, reservation=reservation))
        self._driver.handle(submit)

    def candidate(self, prompt: bytes, salt: str) -> Candidate:
        """What a router that knows everything sees when this prompt arrives."""
        return Candidate(self._queued_s, self._uncached_s(prompt, salt))

    def load(self) -> LoadReport:
        """What the server reports of its load."""
        return LoadReport(*self._scheduler.load(self._world.now))

    def submit(self, rid: str, prompt: bytes, terms: RequestTerms = NO_TERMS, attempt: int = 1) -> None:
        """Take in a request, and the reservation of its peer if KV is handed over. It commits the open prompt of this
        name, if there is one. attempt: 2 for the first retry."""
        self._work[rid] = seconds = self._uncached_s(prompt, terms.prefix_salt)
        self._queued_s += seconds
        self.open_prompts.commit(
            rid, lambda: self._bring(prompt, terms, lambda: self._start(rid, prompt, terms, attempt))
        )

    def cancel(self, rid: str) -> None:
        """The client of a request gives it up, if it has not ended."""
        self._driver.handle(Abort(rid=rid))

    def _bring(self, prompt: bytes, terms: RequestTerms, go_on: Callable[[], None]) -> None:
        """Go on with a prompt when what siblings have of it has come."""
        if self._siblings is None:
            go_on()
        else:
            self._siblings.bring(prompt, terms, go_on)

    def _start(self, rid: str, prompt: bytes, terms: RequestTerms, attempt: int) -> None:
        route = SendTo(rid) if self._hands_over else Discard()
        sampling = HANDED_OVER if self._hands_over else ANSWERED
        if self._hands_over:
            tokens = len(prompt) // ITEM_BYTES
            pages = pack(range(ceil_div(tokens, self._config.page_size)))
            reservation = Reservation(
                ticket=rid, generation=attempt, prompt_tokens=tokens, cached_tokens=0, pages=pages, row=0
            )
            self._driver.handle(PeerReserved(session=PEER, reservation=reservation))
        self._driver.handle(Submit(rid=rid, prompt=prompt, sampling=sampling, route=route, terms=terms))

    def join(self, peer: str) -> None:
        """A decode server begins a session, which has its name."""
        pools = (Geometry("float32", 1, 1, 1, self._config.page_size),)
        terms = PeerTerms(session=peer, geometries=pools, window_bytes=1 << 30)
        self._driver.handle(PeerJoined(name=peer, terms=terms))

    def compute(
        self,
        rid: str,
        prompt: bytes,
        terms: RequestTerms,
        peer: str,
        reservation: Reservation,
        handed_over: HandedOver,
    ) -> None:
        """Take in a prompt of a decode server that has joined, and its reservation. handed_over: called when its KV is
        there, or it has failed."""
        self._handed_over[rid] = handed_over
        self._driver.handle(PeerReserved(session=peer, reservation=reservation))
        submit = Submit(rid=rid, prompt=prompt, sampling=HANDED_OVER, route=SendTo(rid), terms=terms)
        self._bring(prompt, terms, lambda: self._driver.handle(submit))

    def _uncached_s(self, prompt: bytes, salt: str) -> float:
        cached = self._scheduler.cached_tokens(prompt, salt)
        return row_seconds(self._cost, cached, len(prompt) // ITEM_BYTES - cached)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReplicaKvEvent():
                    self._cached(effect.event)
                case BlockStored() | BlockRemoved() | AllBlocksCleared():
                    self._cached(effect)
                case PrepareReceive():
                    self._fetches.prepare(effect)
                case AskReserve():
                    self._fetches.reserved(effect.reservation)
                case MakeForecast():
                    self._forecast(effect)
                case PrefixReply():
                    self.returns.replied(effect)
                case Order():
                    self.pipeline.order(effect)
                case Progress():
                    self.open_prompts.progressed(effect)
                case RequestFinished() | RequestFailed() if self._serves_another(effect):
                    pass
                case Tokens():
                    self._leave_queue(effect.rid)
                    self._first_token(effect.rid)
                case RequestFinished() | RequestFailed() if effect.rid in self._handed_over:
                    self._handed_over.pop(effect.rid)(effect)
                case RequestFinished():
                    if effect.promise is not None:
                        self._promise(effect.rid, effect.promise)
                    self._ended(effect.rid, effect.usage.cached_tokens, effect.timing.queue_s, None)
                case RequestFailed():
                    self._leave_queue(effect.rid)
                    self._ended(effect.rid, 0, 0.0, effect.error)
                case _:
                    pass

    def _forecast(self, order: MakeForecast) -> None:
        """Look ahead from now; what is found comes later by what that takes."""
        if self._copied is None:
            return
        now = self._world.now
        found = make_forecast(self._scheduler, now, order.seed, order.steps, self._copied)
        made = ForecastMade(forecast=replace(found, took_s=STEP_S * found.steps))
        self._world.at(now + STEP_S * found.steps, lambda: self._driver.handle(made))

    def _serves_another(self, end: RequestFinished | RequestFailed) -> bool:
        """What has ended is no request of a client, but a fetch or a piece of an open prompt."""
        return self._fetches.ended(end) or self.open_prompts.ended(end)

    def _leave_queue(self, rid: str) -> None:
        self._queued_s -= self._work.pop(rid, 0.0)
