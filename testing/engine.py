"""The simulated engine: a pipeline of stages whose "KV" shows every mistake.

The "KV" of a position is a hash of all tokens up to it, kept in the slot that the page table names, on every stage.
A wrong page, a page that was freed too early, a lost or misplaced token: each changes the tokens that are sampled.
Where requests have states, the state is the hash of all tokens so far, and a wrong slot changes the tokens, too.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.messages.orders import (
    CancelForward,
    CancelReceive,
    CancelSend,
    CloseKvFile,
    CloseSession,
    DropPages,
    Forward,
    LoadPages,
    OpenKvFile,
    Order,
    PlanRow,
    PrepareReceive,
    ReleaseRequest,
    SendChunk,
    StorePages,
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
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.kv.kv_digests import DigestPages, DigestPart
from headrace.core.types.packed import unpack
from headrace.core.types.ranks.coordinate import Agreement
from headrace.core.types.requests.request import FirstToken
from headrace.testing.tiers import SimulatedDisk, SimulatedTiers
from headrace.testing.world import Channel, World

MODULUS = (1 << 61) - 1
VOCABULARY = 61
STATE = Component("state", "float32", 1, 1, 1, 1, per_request=True)
MISMATCH = 77  # in a hash, where a state is not that of the pages before it
NAN = -2  # KV of a position with NaN, and of all positions after it
NAN_TOKEN = 60  # the token whose KV is NaN, in scenarios that have one
IDLE_S = 1e-5  # mean seconds of a pass in which a replica is idle


def extend(state: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    return NAN if state == NAN else (state * 1_000_003 + token + 7) % MODULUS


def kv_of(tokens: Sequence[int]) -> list[int]:
    """KV of each position of a prompt."""
    return list(accumulate(tokens, extend, initial=0))[1:]


def kv_digest(values: Sequence[int]) -> DigestPart:
    """The digest of KV of some positions."""
    return DigestPart("kv", 0, 0, 1, sha256(repr(list(values)).encode()).digest())


def next_token(state: int) -> int:
    """The token that follows a prefix with this hash."""
    return state % VOCABULARY


def expected_tokens(prompt: tuple[int, ...], max_tokens: int, stop: tuple[int, ...], min_tokens: int) -> list[int]:
    """The tokens that a request must generate, from its prompt alone."""
    state = 0
    for token in prompt:
        state = extend(state, token)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = next_token(state)
        tokens.append(token)
        if token in stop and len(tokens) >= min_tokens:
            break
        state = extend(state, token)
    return tokens


@dataclass(slots=True)
class SimulatedChunk:
    """The KV of one SendChunk of one stage, on its way."""

    stage: int
    """The stage that sends it, in its replica."""

    stages: int
    """Stages of that replica of the prefill server."""

    rank: int
    """The rank that sends it."""

    order: SendChunk
    values: list[int]
    """KV of positions [order.start, order.start + len(values))."""

    state: int | None
    """The request's state, where the chunk carries it."""

    acked: Callable[[], None]
    """To be called when every receiver has it."""

    receivers: int = 0
    """Stages of the decode server that have not received it."""

    written: bool = False
    """It was written into the peer's pages directly."""


@dataclass(slots=True)
class PendingReceive:
    """KV that a stage was ordered to receive, as far as it has come."""

    order: PrepareReceive
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Chunks that have come, by sending stage and number."""

    pieces: dict[int, dict[int, int]] = field(default_factory=dict)
    """Where chunks that have come end, by sending stage and where they begin."""

    totals: dict[int, int] = field(default_factory=dict)
    """Chunks to come from each sending stage whose last chunk has come."""

    first: FirstToken | None = None

    def until(self, stages: int) -> int:
        """Positions before this one have come from so many sending stages, without a gap."""
        ends = []
        for stage in range(stages):
            end, pieces = self.order.start, self.pieces.get(stage, {})
            while pieces.get(end, end) > end:
                end = pieces[end]
            ends.append(end)
        return min(ends)


class SimulatedExchange:
    """Where lockstep replicas of one engine meet: no rank computes a pass before all ranks of its stage have come.

    A replica that is not told of a pass leaves the others waiting for ever, as it would in a collective.
    """

    def __init__(self, replicas: int, violation: Callable[[str], None]) -> None:
        """violation: is told what is wrong with an order."""
        self._replicas = replicas
        self._violation = violation
        self._waiting: dict[tuple[int, int], dict[int, Callable[[], None]]] = {}
        self._agreements: dict[int, Agreement] = {}

    def ordered(self, replica: int, order: Forward) -> None:
        """A replica was told of a pass: check the agreement as its ranks do."""
        agreement = order.agreement
        if agreement is None or len(agreement.tokens) != self._replicas:
            self._violation(f"pass {order.seq} has the agreement {agreement} of {self._replicas} replicas")
            return
        if (tokens := sum(row.count for row in order.rows)) != agreement.tokens[replica]:
            self._violation(f"pass {order.seq} has {tokens} tokens of replica {replica}, not {agreement}")
        if agreement.idle or self._agreements.setdefault(order.seq, agreement) != agreement:
            self._violation(f"pass {order.seq} has {agreement}, and {self._agreements[order.seq]} elsewhere")

    def enter(self, stage: int, seq: int, replica: int, go_on: Callable[[], None]) -> None:
        """A rank has come to a pass; it goes on once the ranks of all replicas have."""
        waiting = self._waiting.setdefault((stage, seq), {})
        if replica in waiting:
            self._violation(f"pass {seq} has replica {replica} twice")
        waiting[replica] = go_on
        if len(waiting) == self._replicas:
            for each in self._waiting.pop((stage, seq)).values():
                each()


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a simulated engine behaves."""

    token_s: float
    """Seconds that a stage takes for a token."""

    has_nan_token: bool
    """KV of NAN_TOKEN is NaN."""

    host_pages: int
    """Slots of the host tier of each stage."""

    disk_pages: int
    """Likewise of the disk tier."""

    tier_faults: float
    """As in SimulatedTiers."""

    states: bool = False
    """Requests have states, in slots of the pool."""

    cancels: bool = False
    """Stages end a pass when it is cancelled, with KV of no use."""

    def extend(self, state: int, token: int) -> int:
        """The KV of a token behind a prefix."""
        return NAN if self.has_nan_token and token == NAN_TOKEN else extend(state, token)


class SimulatedPipeline:
    """The stages of one replica of an engine."""

    def __init__(
        self,
        world: World,
        config: SchedulerConfig,
        replica: int,
        options: EngineOptions,
        report: Callable[[AnyStageEvent], None],
        ship: Callable[[SimulatedChunk], None],
        disks: Sequence[SimulatedDisk],
        exchange: SimulatedExchange | None,
    ) -> None:
        """report: takes events, in order for each stage. ship: takes chunks that are sent. disks: of the stages, where
        there are tiers. exchange: where lockstep replicas meet; None where they share nothing."""
        self.world = world
        self.config = config
        self.replica = replica
        self.exchange = exchange
        self.options = options
        self.report = report
        self.ship = ship
        self.sampled: dict[tuple[int, int], int] = {}
        """Tokens that this pipeline sampled, by request and position."""

        ranks = config.layout.replica_ranks(replica)
        self.computed: list[set[int]] = [set() for _ in ranks]
        """Order numbers of the Forwards that each stage has computed."""

        self.disks = disks
        self.stages = [SimulatedStage(self, index, rank) for index, rank in enumerate(ranks)]
        self.dead = False
        """It has crashed: nothing is reported any more."""

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.stages) - 1

    def start(self) -> None:
        """Have every stage report that it is ready, and then what is on its disk."""
        config, options = self.config, self.options
        geometry = Geometry("float32", 1, 1, 1, config.page_size, components=(STATE,) if options.states else ())
        for stage in self.stages:
            stage.report(
                StageReady(
                    stage=stage.rank,
                    geometry=geometry,
                    fingerprint="simulated",
                    data_port=1,
                    kv_pages=config.kv_pages,
                    vocab_size=VOCABULARY,
                    host_pages=options.host_pages,
                    disk_pages=options.disk_pages,
                    cancels=options.cancels and self.exchange is None,
                )
            )
            if stage.tiers is not None and options.disk_pages:
                stage.tiers.scan()

    def order(self, order: Order) -> None:
        """Send an order to every stage."""
        for stage in self.stages:
            stage.inbox.put(lambda stage=stage: stage.execute(order))  # type: ignore[misc]

    def wake(self) -> None:
        """A Forward was computed: stages that wait for its results may go on."""
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

    def __init__(self, pipeline: SimulatedPipeline, index: int, rank: int) -> None:
        self.pipeline = pipeline
        self.index = index
        self.rank = rank
        self.page_size = pipeline.config.page_size
        self.pool = [[-1] * self.page_size for _ in range(pipeline.config.kv_pages)]
        self.states: dict[int, int] = {}
        """By slot."""

        self.log: list[Order] = []
        self.inbox = Channel(pipeline.world, 0.001)
        self._outbox = Channel(pipeline.world, 0.001)
        self._queue: deque[Forward] = deque()
        self._waiting_sends: list[SendChunk] = []  # wait for the Forward that computes their pages
        self._running: Forward | None = None
        self._cancelled_plans: set[int] = set()
        self._cancelled: set[int] = set()
        self._cancel_asked: set[int] = set()
        self._sending: Counter[int] = Counter()
        self._pending: dict[tuple[str, str, int], PendingReceive] = {}
        self.tiers: SimulatedTiers | None = None
        if pipeline.disks:
            disk, faults = pipeline.disks[index], pipeline.options.tier_faults
            self.tiers = SimulatedTiers(pipeline.world, rank, self.pool, disk, faults, self.report, kv_of)
        self.revoked: set[str] = set()  # sessions through which nothing can be written any more

    def report(self, event: AnyStageEvent) -> None:
        """Send an event to the scheduler, unless the engine has crashed meanwhile."""
        pipeline = self.pipeline
        self._outbox.put(lambda: None if pipeline.dead else pipeline.report(event))

    def execute(self, order: Order) -> None:
        """Act on an order, as a stage does."""
        if self.pipeline.dead:
            return
        self.log.append(order)
        match order:
            case Forward():
                if self.pipeline.exchange is not None:
                    self.pipeline.exchange.ordered(self.pipeline.replica, order)
                self._queue.append(order)
                self.compute()
            case CancelForward():
                self._cancelled_plans.add(order.forward)
                if self._running is not None and self._running.seq == order.forward:
                    self._computed(self._running, 0.0)
            case SendChunk() if order.after and order.after not in self.pipeline.computed[self.index]:
                self._waiting_sends.append(order)
            case SendChunk():
                self._start_sending(order)
            case ReleaseRequest():
                self._cancelled.discard(order.request)
                self._drop_receive(order.request)
            case CancelSend():
                self._cancelled.add(order.request)
                self._cancel_asked.add(order.request)
                self._report_cancelled(order.request)
            case PrepareReceive():
                self._pending[(order.session, order.ticket, order.generation)] = PendingReceive(order)
                self.report(ReceivePrepared(stage=self.rank, request=order.request))
            case CancelReceive():
                self._drop_receive(order.request)
                self.report(ReceiveCancelled(stage=self.rank, request=order.request))
            case StorePages() | LoadPages() | DropPages() | OpenKvFile() | CloseKvFile() if self.tiers is not None:
                self.tiers.execute(order)
            case CloseSession():  # as long as the sender may go on writing
                self.pipeline.world.after(0.05, lambda: self._revoke(order.session))
            case _:
                pass

    def compute(self) -> None:
        """Start the next Forward, unless one is running or its input is missing."""
        if not self._queue or self._running is not None or not self._can_start(self._queue[0]):
            return
        self._running = order = self._queue.popleft()
        seconds = self.pipeline.options.token_s * sum(row.count for row in order.rows)
        if order.seq in self._cancelled_plans:
            seconds = 0.0

        def run() -> None:
            self.pipeline.world.after(seconds or IDLE_S, lambda: self._computed(order, seconds))

        if self.pipeline.exchange is None:
            run()
        else:
            self.pipeline.exchange.enter(self.index, order.seq, self.pipeline.replica, run)

    def write(self, chunk: SimulatedChunk) -> None:
        """Put the KV of a chunk into the pages that were reserved for it, and the state into its slot."""
        send, values = chunk.order, chunk.values
        if chunk.state is not None:
            self.states[send.dst_slot] = chunk.state
        pages = unpack(send.dst_pages)
        base = send.start // self.page_size
        for offset, value in enumerate(values, send.start):
            self.pool[pages[offset // self.page_size - base]][offset % self.page_size] = value

    def receive(self, chunk: SimulatedChunk) -> None:
        """Take in a chunk from a prefill stage: write it, unless it has been written, and acknowledge it. A chunk that
        is not expected any more is ignored."""
        send = chunk.order
        pending = self._pending.get((send.session, send.ticket, send.generation))
        if pending is None or self.pipeline.dead:
            return
        if not chunk.written:
            self.write(chunk)
        pending.seen.add((chunk.stage, send.chunk))
        pending.pieces.setdefault(chunk.stage, {})[send.start] = send.start + len(chunk.values)
        if send.last is not None:
            pending.totals[chunk.stage] = send.chunk + 1
            pending.first = send.last
        chunk.receivers -= 1
        if chunk.receivers == 0:
            chunk.acked()
        until = pending.until(chunk.stages)
        self.report(ChunkReceived(stage=self.rank, request=pending.order.request, until=until))
        self._arrived(pending, chunk.stages)

    def _arrived(self, pending: PendingReceive, stages: int) -> None:
        if len(pending.totals) < stages or len(pending.seen) < sum(pending.totals.values()):
            return
        assert pending.first is not None, "the last chunk carries it"
        self._drop_receive(pending.order.request)
        chunks = len(pending.seen)
        request = pending.order.request
        self.report(KvReceived(stage=self.rank, request=request, first=pending.first, bytes=chunks, chunks=chunks))

    def left(self) -> set[int]:
        """Requests that the stage still does something for, or remembers."""
        waiting = {order.request for order in self._waiting_sends}
        prepared = {pending.order.request for pending in self._pending.values()}
        return waiting | prepared | self._cancelled | self._cancel_asked | set(+self._sending)

    def _revoke(self, session: str) -> None:
        self.revoked.add(session)
        self.report(SessionClosed(stage=self.rank, session=session))

    def _drop_receive(self, request: int) -> None:
        for key in [key for key, pending in self._pending.items() if pending.order.request == request]:
            del self._pending[key]

    def _can_start(self, order: Forward) -> bool:
        upstream = self.index == 0 or order.seq in self.pipeline.computed[self.index - 1]
        return upstream and all(self.pipeline.token_of(row) is not None for row in order.rows)

    def _computed(self, order: Forward, seconds: float) -> None:
        if self.pipeline.dead or self._running is not order:
            return  # it was cancelled
        self._running = None
        cancelled = order.seq in self._cancelled_plans
        states = [(row, self._spoil(row) if cancelled else self._run(row)) for row in order.rows]
        samples: list[SampledToken] = []
        nonfinite: list[int] = []
        for row, state in states if self.index == self.pipeline.last else ():
            if row.sample and row.feeds:
                self.pipeline.sampled[(row.request, row.start + row.count)] = next_token(state)
            if state == NAN:
                nonfinite.append(row.request)
            elif row.sample:
                samples.append(SampledToken(row.request, next_token(state)))
        self.pipeline.computed[self.index].add(order.seq)
        for send in [send for send in self._waiting_sends if send.after == order.seq]:
            self._waiting_sends.remove(send)
            self._start_sending(send)
        self.report(
            PlanDone(
                stage=self.rank,
                seq=order.seq,
                duration_s=seconds,
                samples=tuple(samples),
                nonfinite=tuple(nonfinite),
                digest=self._digest(order.digest),
            )
        )
        self.pipeline.wake()

    def _digest(self, wanted: DigestPages | None) -> tuple[DigestPart, ...]:
        """The digest of what is in pages now, as a stage makes it of one layer."""
        if wanted is None:
            return ()
        values = [value for page in unpack(wanted.pages) for value in self.pool[page]]
        return (kv_digest(values[wanted.first : wanted.first + wanted.count]),)

    def _run(self, row: PlanRow) -> int:
        """Compute a row: extend the hash of the prefix in the pool by the row's tokens. Returns the last hash."""
        size, pages = self.page_size, unpack(row.pages)
        tokens = self.pipeline.token_of(row)
        assert tokens is not None, "checked before the plan started"
        before = row.start - 1
        state = self.pool[pages[before // size]][before % size] if row.start else 0
        if row.start and self.pipeline.options.states:
            kept = self.states.get(row.slot if row.resume < 0 else row.resume)
            state = state if kept == state else MISMATCH
        for position, token in enumerate(tokens, row.start):
            state = self.pipeline.options.extend(state, token)
            self.pool[pages[position // size]][position % size] = state
        self.states.update((slot, state) for slot in (row.slot, row.checkpoint) if slot >= 0)
        return state

    def _spoil(self, row: PlanRow) -> int:
        """What a cancelled pass leaves in the pages of a row."""
        for position in range(row.start, row.start + row.count):
            self.pool[unpack(row.pages)[position // self.page_size]][position % self.page_size] = MISMATCH
        self.states.update((slot, MISMATCH) for slot in (row.slot, row.checkpoint) if slot >= 0)
        return MISMATCH

    def _start_sending(self, order: SendChunk) -> None:
        if order.request not in self._cancelled:
            self._sending[order.request] += 1
            self.pipeline.world.after(0.003, lambda: self._sent(order))

    def _sent(self, order: SendChunk) -> None:
        """Ship the chunk as the pages are now: until then they must not have been changed."""
        pipeline = self.pipeline
        if pipeline.dead:
            return
        size, pages = self.page_size, unpack(order.pages)
        base = order.start // size
        positions = range(order.start, order.start + order.count)
        values = [self.pool[pages[position // size - base]][position % size] for position in positions]
        state = self.states.get(order.slot) if order.last is not None else None
        event = ChunkAcked(stage=self.rank, request=order.request, chunk=order.chunk, bytes=4 * order.count)

        def acked() -> None:
            for _ in range(1 if pipeline.world.random.random() < 0.9 else 2):
                self.report(event)

        pipeline.ship(SimulatedChunk(self.index, len(pipeline.stages), self.rank, order, values, state, acked))
        self._sending[order.request] -= 1
        self._report_cancelled(order.request)

    def _report_cancelled(self, request: int) -> None:
        if request in self._cancel_asked and not self._sending[request]:
            self._cancel_asked.discard(request)
            del self._sending[request]
            self.report(SendCancelled(stage=self.rank, request=request))
