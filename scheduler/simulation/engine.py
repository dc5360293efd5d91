"""A pipeline that computes nothing but the truth: the engine of the simulator.

The "KV" of a position is a hash of all tokens up to it, kept in the slot that the page table names, on every stage.
A wrong page, a page that was given away too early, a lost or misplaced token: each changes the tokens that come out.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.messages.orders import (
    CancelReceive,
    CancelSend,
    CloseSession,
    Forward,
    Order,
    PlanRow,
    PrepareReceive,
    ReleaseRequest,
    SendChunk,
)
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    ChunkAcked,
    ChunkReceived,
    KvReceived,
    PlanDone,
    ReceiveCancelled,
    ReceivePrepared,
    SampledToken,
    SendCancelled,
    SessionClosed,
    StageReady,
)
from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.geometry import Geometry
from headrace.core.types.packed import unpack
from headrace.core.types.request import FirstToken
from headrace.scheduler.simulation.model import VOCABULARY, extend, next_token


class World:
    """Virtual time, randomness by seed, and what is going to happen."""

    def __init__(self, seed: int) -> None:
        self.clock = VirtualClock()
        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, action))

    def after(self, mean_s: float, action: Callable[[], None]) -> None:
        """Do it after a random delay."""
        self.at(self.now + self.random.expovariate(1 / mean_s), action)

    def run(self, limit: int) -> bool:
        """Let everything happen; False when more than limit events did."""
        for _ in range(limit):
            if not self._heap:
                return True
            when, _, action = heapq.heappop(self._heap)
            self.clock.advance(max(0.0, when - self.now))
            action()
        return False


class Channel:
    """First in, first out, after random delays; different channels overtake each other."""

    def __init__(self, world: World, mean_s: float) -> None:
        self._world = world
        self._mean_s = mean_s
        self._last = 0.0

    def put(self, deliver: Callable[[], None]) -> None:
        delay = self._world.random.expovariate(1 / self._mean_s)
        self._last = max(self._last, self._world.now + delay)
        self._world.at(self._last, deliver)


@dataclass(slots=True)
class SimulatedChunk:
    """One SendChunk of one stage on its way. values: the KV of positions [start, start + len(values)). written: it is
    in the peer's pages already."""

    stage: int
    stages: int
    order: SendChunk
    values: list[int]
    acked: Callable[[], None]
    receivers: int = 0
    written: bool = False


@dataclass(slots=True)
class Expectation:
    order: PrepareReceive
    seen: set[tuple[int, int]] = field(default_factory=set)
    totals: dict[int, int] = field(default_factory=dict)
    first: FirstToken | None = None


class SimulatedPipeline:
    """The stages of one engine. report: takes what they have to say, in order for each stage. ship: takes chunks."""

    def __init__(
        self,
        world: World,
        stages: int,
        pages: int,
        page_size: int,
        token_s: float,
        report: Callable[[AnyStageEvent], None],
        ship: Callable[[SimulatedChunk], None],
    ) -> None:
        self.world = world
        self.report = report
        self.ship = ship
        self.token_s = token_s
        self.page_size = page_size
        self.sampled: dict[tuple[int, int], int] = {}
        self.computed: list[set[int]] = [set() for _ in range(stages)]
        self.stages = [SimulatedStage(self, index, pages, page_size) for index in range(stages)]
        self.dead = False

    @property
    def last(self) -> int:
        return len(self.stages) - 1

    def start(self, pages: int, page_size: int) -> None:
        geometry = Geometry("float32", 1, 1, 1, page_size)
        for stage in self.stages:
            stage.say(
                StageReady(
                    stage=stage.index,
                    geometry=geometry,
                    fingerprint="simulated",
                    data_port=1,
                    kv_pages=pages,
                    vocab_size=VOCABULARY,
                )
            )

    def obey(self, order: Order) -> None:
        for stage in self.stages:
            stage.inbox.put(lambda stage=stage: stage.obey(order))  # type: ignore[misc]

    def poke(self) -> None:
        """Something was computed: whoever waits for it may go on."""
        for stage in self.stages:
            stage.compute()

    def token_of(self, row: PlanRow) -> list[int] | None:
        """The input tokens of a row; None while the pipeline has not sampled the one it needs."""
        if row.tokens:
            return list(unpack(row.tokens))
        token = self.sampled.get((row.request, row.start))
        return None if token is None else [token]


class SimulatedStage:
    """One stage: Forwards in stream order, a sender, a receiver."""

    def __init__(self, pipeline: SimulatedPipeline, index: int, pages: int, page_size: int) -> None:
        self.pipeline = pipeline
        self.index = index
        self.page_size = page_size
        self.pool = [[-1] * page_size for _ in range(pages)]
        self.log: list[Order] = []
        self.inbox = Channel(pipeline.world, 0.001)
        self._outbox = Channel(pipeline.world, 0.001)
        self._queue: deque[Forward] = deque()
        self._held: list[SendChunk] = []  # until the Forward that computes their pages is done
        self._busy = False
        self._cancelled: set[int] = set()
        self._quiet_asked: set[int] = set()
        self._sending: Counter[int] = Counter()
        self._expected: dict[tuple[str, str, int], Expectation] = {}
        self.revoked: set[str] = set()  # sessions through which nobody can write any more

    def say(self, event: AnyStageEvent) -> None:
        pipeline = self.pipeline
        self._outbox.put(lambda: None if pipeline.dead else pipeline.report(event))

    def obey(self, order: Order) -> None:
        if self.pipeline.dead:
            return
        self.log.append(order)
        match order:
            case Forward():
                self._queue.append(order)
                self.compute()
            case SendChunk() if order.after not in self.pipeline.computed[self.index]:
                self._held.append(order)
            case SendChunk():
                self._start_sending(order)
            case ReleaseRequest():
                self._cancelled.discard(order.request)
                self._forget(order.request)
            case CancelSend():
                self._cancelled.add(order.request)
                self._quiet_asked.add(order.request)
                self._quiet(order.request)
            case PrepareReceive():
                self._expected[(order.session, order.ticket, order.generation)] = Expectation(order)
                self.say(ReceivePrepared(stage=self.index, request=order.request))
            case CancelReceive():
                self._forget(order.request)
                self.say(ReceiveCancelled(stage=self.index, request=order.request))
            case CloseSession():  # whoever sends may be stopped, and goes on for as long
                self.pipeline.world.after(0.05, lambda: self._revoke(order.session))
            case _:
                pass

    def compute(self) -> None:
        """Start the next Forward, unless one is running or its input is not there yet."""
        if not self._queue or self._busy or not self._can_start(self._queue[0]):
            return
        self._busy = True
        order = self._queue.popleft()
        seconds = self.pipeline.token_s * sum(row.count for row in order.rows)
        self.pipeline.world.after(seconds, lambda: self._computed(order, seconds))

    def write(self, send: SendChunk, values: list[int]) -> None:
        """Put the KV of a chunk into the pages that were reserved for it."""
        pages = unpack(send.dst_pages)
        base = send.start // self.page_size
        for offset, value in enumerate(values, send.start):
            self.pool[pages[offset // self.page_size - base]][offset % self.page_size] = value

    def receive(self, chunk: SimulatedChunk) -> None:
        """A chunk from a prefill stage. Acknowledged only while it is expected, and written here unless it has been."""
        send = chunk.order
        expectation = self._expected.get((send.session, send.ticket, send.generation))
        if expectation is None or self.pipeline.dead:
            return
        if not chunk.written:
            self.write(send, chunk.values)
        expectation.seen.add((chunk.stage, send.chunk))
        if send.last is not None:
            expectation.totals[chunk.stage] = send.chunk + 1
            expectation.first = send.last
        chunk.receivers -= 1
        if chunk.receivers == 0:
            chunk.acked()
        self.say(ChunkReceived(stage=self.index, request=expectation.order.request))
        self._arrived(expectation, chunk.stages)

    def _arrived(self, expectation: Expectation, stages: int) -> None:
        if len(expectation.totals) < stages or len(expectation.seen) < sum(expectation.totals.values()):
            return
        assert expectation.first is not None, "the last chunk carries it"
        self._forget(expectation.order.request)
        chunks = len(expectation.seen)
        request = expectation.order.request
        self.say(KvReceived(stage=self.index, request=request, first=expectation.first, bytes=chunks, chunks=chunks))

    def _revoke(self, session: str) -> None:
        self.revoked.add(session)
        self.say(SessionClosed(stage=self.index, session=session))

    def _forget(self, request: int) -> None:
        for key in [key for key, expected in self._expected.items() if expected.order.request == request]:
            del self._expected[key]

    def _can_start(self, order: Forward) -> bool:
        upstream = self.index == 0 or order.seq in self.pipeline.computed[self.index - 1]
        return upstream and all(self.pipeline.token_of(row) is not None for row in order.rows)

    def _computed(self, order: Forward, seconds: float) -> None:
        if self.pipeline.dead:
            return
        self._busy = False
        samples = tuple(sampled for row in order.rows if (sampled := self._run(row)) is not None)
        if self.index != self.pipeline.last:
            samples = ()
        for sampled, row in zip(samples, [row for row in order.rows if row.sample], strict=True) if samples else ():
            if row.feeds:
                self.pipeline.sampled[(row.request, row.start + row.count)] = sampled.token
        self.pipeline.computed[self.index].add(order.seq)
        for send in [send for send in self._held if send.after == order.seq]:
            self._held.remove(send)
            self._start_sending(send)
        self.say(PlanDone(stage=self.index, seq=order.seq, duration_s=seconds, samples=samples))
        self.pipeline.poke()

    def _run(self, row: PlanRow) -> SampledToken | None:
        """Compute a row: extend the hash of the prefix in the pool by the row's tokens."""
        size, pages = self.page_size, unpack(row.pages)
        tokens = self.pipeline.token_of(row)
        assert tokens is not None, "checked before the plan started"
        before = row.start - 1
        state = self.pool[pages[before // size]][before % size] if row.start else 0
        for position, token in enumerate(tokens, row.start):
            state = extend(state, token)
            self.pool[pages[position // size]][position % size] = state
        return SampledToken(row.request, next_token(state)) if row.sample else None

    def _start_sending(self, order: SendChunk) -> None:
        if order.request not in self._cancelled:
            self._sending[order.request] += 1
            self.pipeline.world.after(0.003, lambda: self._sent(order))

    def _sent(self, order: SendChunk) -> None:
        """The bytes have left: until now the pages must have been what they were."""
        pipeline = self.pipeline
        if pipeline.dead:
            return
        size, pages = self.page_size, unpack(order.pages)
        base = order.start // size
        positions = range(order.start, order.start + order.count)
        values = [self.pool[pages[position // size - base]][position % size] for position in positions]
        event = ChunkAcked(stage=self.index, request=order.request, chunk=order.chunk, bytes=4 * order.count)

        def acked() -> None:
            for _ in range(1 if pipeline.world.random.random() < 0.9 else 2):
                self.say(event)

        pipeline.ship(SimulatedChunk(self.index, len(pipeline.stages), order, values, acked))
        self._sending[order.request] -= 1
        self._quiet(order.request)

    def _quiet(self, request: int) -> None:
        if request in self._quiet_asked and not self._sending[request]:
            self._quiet_asked.discard(request)
            del self._sending[request]
            self.say(SendCancelled(stage=self.index, request=request))
