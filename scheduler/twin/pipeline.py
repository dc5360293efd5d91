"""Stages without a model, in virtual time: every forward pass takes what the cost model says.

    Forward ─► stage 0 ├─ f ─┤─► stage 1 ├─ f ─┤─► PlanDone        a stage computes one pass at a time, in order
    SendChunk          the peers fetch it when it is computed, at once or at a set rate ─► ChunkAcked
    StorePages   when the passes ordered before it are computed, and the stores before it are done ─► PagesStored
    LoadPages    when the loads before it are done ─────────────────────────────────────────────────► PagesLoaded

A pass that is cancelled ends soon after; those behind it begin then.
"""

from collections import deque
from collections.abc import Callable, Sequence

from headrace.core.messages.orders import (
    CancelForward,
    CancelReceive,
    CancelSend,
    Forward,
    LoadPages,
    Order,
    PlanRow,
    SendChunk,
    StorePages,
)
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    ChunkAcked,
    PagesLoaded,
    PagesStored,
    PlanDone,
    ReceiveCancelled,
    SampledToken,
    SendCancelled,
    StageReady,
)
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import ITEM_BYTES
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.row_costs import pass_seconds
from headrace.scheduler.twin.world import World

VOCABULARY = 1 << 31  # any token id is one
TOKEN = 0  # what requests sample whose answer is not known
LEAST_LEFT = 0.1  # share of a pass that is left at least where it should be done by now
CANCEL_S = 0.002  # in which a stage has given a pass up


class TimedHostTier:
    """The host tiers of all stages of a replica, without memory, which copy at the same time: copies take what a rate
    says, in both directions at once."""

    def __init__(
        self, world: World, stages: int, page_size: int, tokens_s: float | None, report: Callable[[AnyStageEvent], None]
    ) -> None:
        """tokens_s: tokens a second whose KV is copied in each direction; None: at once. report: takes the stages'
        events."""
        self._world = world
        self._stages = range(stages)
        self._token_s = 0.0 if tokens_s is None else 1 / tokens_s
        self._page_size = page_size
        self._report = report
        self._stored_at = 0.0
        self._loaded_at = 0.0

    def store(self, order: StorePages) -> None:
        """Copy pages out of the pool: the passes ordered before are computed."""
        self._stored_at = max(self._world.now, self._stored_at) + self._seconds(order.slots)
        self._answer(self._stored_at, [PagesStored(stage=stage, seq=order.seq) for stage in self._stages])

    def load(self, order: LoadPages) -> None:
        """Copy pages into the pool."""
        self._loaded_at = max(self._world.now, self._loaded_at) + self._seconds(order.slots)
        self._answer(self._loaded_at, [PagesLoaded(stage=stage, seq=order.seq) for stage in self._stages])

    def _seconds(self, slots: bytes) -> float:
        return len(slots) // ITEM_BYTES * self._page_size * self._token_s

    def _answer(self, at: float, events: list[AnyStageEvent]) -> None:
        for event in events:
            self._world.at(at, lambda event=event: self._report(event))  # type: ignore[misc]


class TimedPass:
    """A forward pass on its way through the stages."""

    def __init__(self, order: Forward, seconds: list[float]) -> None:
        """seconds: that each stage takes."""
        self.order = order
        self.stage_s = seconds
        self.cancelled = False
        self.stage = 0
        """Where it is, or waits for its turn."""

        self.began_at: float | None = None
        """When this stage has taken it up; None while it waits."""

        self.seconds = 0.0
        """That this stage takes."""

        self.then: list[Callable[[], None]] = []
        """What happens when the last stage is done with it."""


class TimedPipeline:
    """The stages of one replica, and the link over which decode peers fetch."""

    def __init__(
        self,
        world: World,
        costs: Sequence[Cost],
        fetch_tokens_s: float | None,
        host: TimedHostTier,
        report: Callable[[AnyStageEvent], None],
        read_s: float = 0.0,
        sampled: Callable[[PlanRow], int] = lambda _row: TOKEN,
        slowed: Callable[[], float] = lambda: 1.0,
        vary: Callable[[Forward], float] = lambda _order: 1.0,
    ) -> None:
        """costs: of each stage. fetch_tokens_s: tokens a second whose KV leaves each stage; None: at once. report:
        takes the stages' events. read_s: seconds that all stages add to a pass for each token whose KV is read by a
        request that decodes. sampled: the token that a row samples. slowed: how many times as long a pass takes that
        begins now; vary: the same by the pass, of all stages."""
        self._world = world
        self._costs = costs
        self._fetch_tokens_s = fetch_tokens_s
        self._host = host
        self._report = report
        self._read_s = read_s / len(costs)
        self._sampled = sampled
        self._slowed = slowed
        self._vary = vary
        self._queues: list[deque[TimedPass]] = [deque() for _ in costs]  # of each stage; it computes the first
        self._passes: dict[int, TimedPass] = {}  # by order number, those that are not through; the oldest first
        self._to_send: deque[SendChunk] = deque()  # over a link that has a rate
        self._link_free_at = 0.0
        self.busy_s = [0.0] * len(costs)
        """Seconds of computing, by stage."""

        self.plans = 0
        """Forward passes ordered."""

    def start(self, pages: int, page_size: int, host_pages: int, *, cancels: bool = False) -> None:
        """Report every stage as ready. cancels: it can give a pass up."""
        geometry = Geometry("float32", 1, 1, 1, page_size)
        for stage, cost in enumerate(self._costs):
            self._report(
                StageReady(
                    stage=stage,
                    geometry=geometry,
                    fingerprint="modelled",
                    data_port=1,
                    kv_pages=pages,
                    host_pages=host_pages,
                    vocab_size=VOCABULARY,
                    cost=cost,
                    cancels=cancels,
                )
            )

    def order(self, order: Order) -> None:
        """Act on an order, as all stages do. Orders that take no time are ignored."""
        match order:
            case Forward():
                self._forward(order)
            case CancelForward():
                self._cancel(order.forward)
            case SendChunk():
                self._send(order)
            case CancelSend() | CancelReceive():
                self._world.at(self._world.now, lambda: self._transfer_cancelled(order))
            case StorePages():
                self.after(next(reversed(self._passes), -1), lambda: self._host.store(order))
            case LoadPages():
                self._host.load(order)
            case _:
                pass

    def _cancel(self, seq: int) -> None:
        """Give a pass up, if it is not through: the stage that has it ends CANCEL_S later at the latest, and stages
        behind it take no time. It reports that it is done, as every pass does, without tokens."""
        found = self._passes.get(seq)
        if found is None or found.cancelled:
            return
        found.cancelled = True
        if found.began_at is not None:
            seconds = min(found.seconds, self._world.now + CANCEL_S - found.began_at)
            self.busy_s[found.stage] -= found.seconds - seconds
            self._take(found, found.began_at, seconds)

    def take_over(self, order: Forward, seconds: Sequence[float], stage: int, passed_s: float) -> None:
        """Go on with a pass that was ordered before, in the order in which they were. seconds: that each stage takes
        for it. stage: where it is; passed_s: since that stage has taken it up, if it has no other before it."""
        vary = self._vary(order)
        found = TimedPass(order, [vary * each for each in seconds])
        found.stage = stage
        if not self._queues[stage]:
            found.stage_s[stage] = max(LEAST_LEFT * found.stage_s[stage], found.stage_s[stage] - passed_s)
        self._passes[order.seq] = found
        self._arrive(found)

    def _forward(self, order: Forward) -> None:
        self.plans += 1
        read_s = self._read_s * sum(row.start for row in order.rows if row.generated) if self._read_s else 0.0
        vary = self._vary(order)
        seconds = [vary * (pass_seconds(cost, order.rows) + read_s) for cost in self._costs]
        self._passes[order.seq] = ordered = TimedPass(order, seconds)
        self._arrive(ordered)

    def _arrive(self, arrived: TimedPass) -> None:
        """A pass has come to a stage, which takes it up when it is done with those before."""
        queue = self._queues[arrived.stage]
        queue.append(arrived)
        if queue[0] is arrived:
            self._begin(arrived)

    def _begin(self, begun: TimedPass) -> None:
        seconds = 0.0 if begun.cancelled else begun.stage_s[begun.stage]
        seconds *= self._slowed()
        self.busy_s[begun.stage] += seconds
        self._take(begun, self._world.now, seconds)

    def _take(self, begun: TimedPass, began_at: float, seconds: float) -> None:
        """A stage takes so long for a pass."""
        begun.began_at, begun.seconds, stage = began_at, seconds, begun.stage
        self._world.at(began_at + seconds, lambda: self._computed(begun, stage, seconds))

    def _computed(self, ended: TimedPass, stage: int, seconds: float) -> None:
        """A stage is done with a pass."""
        if (ended.stage, ended.seconds) != (stage, seconds) or ended.began_at is None:
            return  # it was cancelled, and has ended before
        last = stage == len(self._costs) - 1
        ended.began_at = None
        queue = self._queues[stage]
        queue.popleft()
        if last:
            del self._passes[ended.order.seq]
            for action in ended.then:
                action()
            self._pump_link()
        else:
            ended.stage += 1
            self._arrive(ended)
        if queue:
            self._begin(queue[0])
        samples = self._samples(ended.order) if last and not ended.cancelled else ()
        self._report(PlanDone(stage=stage, seq=ended.order.seq, duration_s=seconds, samples=samples))

    def _samples(self, order: Forward) -> tuple[SampledToken, ...]:
        rows = (row for row in order.rows if row.sample is not None)
        return tuple(SampledToken(row.request, self._sampled(row)) for row in rows)

    def after(self, seq: int, action: Callable[[], None]) -> None:
        """Do this when a pass is through; at once if it is. It orders nothing."""
        if (found := self._passes.get(seq)) is not None:
            found.then.append(action)
        else:
            action()

    def _send(self, order: SendChunk) -> None:
        """The chunk leaves when it is computed and, over a link of some rate, the chunks before it have left."""
        if self._fetch_tokens_s is None:
            self.after(order.after, lambda: self._acknowledge_at(self._world.now, order))
        else:
            self._to_send.append(order)
            self._pump_link()

    def _pump_link(self) -> None:
        """Send what is computed, in order."""
        while self._to_send and self._to_send[0].after not in self._passes:
            assert self._fetch_tokens_s is not None, "only then do chunks wait for each other"
            order = self._to_send.popleft()
            self._link_free_at = max(self._world.now, self._link_free_at) + order.count / self._fetch_tokens_s
            self._acknowledge_at(self._link_free_at, order)

    def _acknowledge_at(self, at: float, order: SendChunk) -> None:
        self._world.at(at, lambda: self._acknowledge(order))

    def _transfer_cancelled(self, order: CancelSend | CancelReceive) -> None:
        answer = SendCancelled if isinstance(order, CancelSend) else ReceiveCancelled
        for stage in range(len(self._costs)):
            self._report(answer(stage=stage, request=order.request))

    def _acknowledge(self, order: SendChunk) -> None:
        for stage in range(len(self._costs)):
            self._report(ChunkAcked(stage=stage, request=order.request, chunk=order.chunk, bytes=4 * order.count))
