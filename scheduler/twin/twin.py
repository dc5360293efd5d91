"""One course of the next minute: a copy of a Scheduler in virtual time.

    copied state ─► plans in flight end, peers answer, requests come as in the last minutes ─► what becomes of the queue
                └─► a candidate is admitted first ─► its time to first token

What comes is a stretch of the last minutes from a random time on, so that requests that came together come together
again (moving block bootstrap: Künsch, "The Jackknife and the Bootstrap for General Stationary Observations", 1989). Of
a prompt that was partly cached, what comes is one of as much work.
"""

from collections.abc import Iterator
from math import sqrt

from msgspec.structs import replace

from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Order, ReplicaOrder
from headrace.core.messages.peers import PeerJoined, PeerReserved
from headrace.core.messages.replies import Tokens
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.request import AnyRoute, DecodeHere, Discard, SamplingParams, SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.promises.recent import RecentArrival
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.stages import TwinStages
from headrace.scheduler.twin.world import SchedulerDriver, World

PEER = "twin"  # the session of the decode peer that takes what is sent to none that is known
WINDOW_BYTES = 1 << 30
CANDIDATE = "twin-candidate"
LOOKED_AT = 64  # recent requests, for one that is like a candidate


class Twin:
    """Runs a Scheduler ahead, which nothing else uses any more: it is a copy."""

    def __init__(self, scheduler: Scheduler, now: float, seed: int, arriving: float = 1.0) -> None:
        """now: of the scheduler's state. arriving: share of what comes that comes here."""
        self._began = now
        self._world = World(seed)
        self._world.now = now
        self._state = scheduler.state
        self._state.metrics.trace = None
        self._driver = SchedulerDriver(self._world, scheduler, self._perform)
        self._stages = [
            TwinStages(self._world, self._state, replica, self._driver.handle) for replica in self._state.replicas
        ]
        self._arriving = arriving
        self._count = 0
        self._first_token_at: float | None = None
        self._candidate = ""
        self.steps = 0
        """Things that have happened."""

    @property
    def elapsed_s(self) -> float:
        """Seconds that it has run ahead."""
        return self._world.now - self._began

    def start(self) -> None:
        """Go on from the state, and have requests come."""
        for stages in self._stages:  # before the first event, which may have plans ordered
            stages.take_over()
        self._end_decoding()
        self._answer_peers()
        coming = self._coming()
        self._await(next(coming, None), coming)

    def admit(self, tokens: int) -> tuple[float, float] | None:
        """A candidate of so many tokens, none of them cached, comes now, on the terms of a recent request of about this
        work. Returns what sums predict: seconds of its work, and to its first token; None if it does not fit."""
        costs = self._state.replicas[0].costs
        work = Load.between(0, tokens)
        alike = self._alike(costs.load_s(work))
        arrival = alike or RecentArrival(self._world.now, work, 0, None, "", False, 1)
        state, config = self._state, self._state.config
        state.config = replace(config, refuse_unreachable=False, max_predicted_ttft_s=0.0, max_queued_s=0.0)
        self._candidate = CANDIDATE
        self._submit(CANDIDATE, arrival, tokens)
        state.config = config
        request = state.requests.live(CANDIDATE)
        if request is None or request.predicted_ttft_s is None:
            return None
        return state.of(request).costs.load_s(work), request.predicted_ttft_s

    def first_token_s(self, horizon_s: float, steps: int) -> float | None:
        """Run until the candidate has its first token: seconds that this took. When the time or the steps are over, it
        is what has passed and what sums predict for the rest. None if it has failed."""
        while self._first_token_at is None and self._step(horizon_s, steps):
            pass
        if self._first_token_at is not None:
            return self._first_token_at - self._began
        request = self._state.requests.live(CANDIDATE)
        if request is None:
            return None
        return self.elapsed_s + self._left_s(request)

    def _left_s(self, request: Request) -> float:
        """Seconds to the first token of the candidate from now on, as sums predict them. Under fcfs nothing that has
        come since goes before it, so that it is what they predicted when it came."""
        replica, terms = self._state.of(request), request.terms
        if replica.queues.policy.strict:
            return max(0.0, (request.predicted_ttft_s or 0.0) - self.elapsed_s)
        load, start = request.work, max(request.planned, request.queued.expected_cached)
        replica.queues.withdraw(request)  # sums are of what is beside it
        left = replica.predictor.predict(terms.priority, terms.slo_ttft_s, load, start, self._world.now)
        return left.ttft_s if load.tokens else 0.0

    def queue_seconds(self, horizon_s: float, steps: int) -> Iterator[float]:
        """Run ahead; what is to be computed at each full second, in predicted seconds. Fewer of them if the steps are
        over before."""
        self._driver.go_on()
        for second in range(1, round(horizon_s) + 1):
            while self._step(float(second), steps):
                pass
            if self.steps >= steps:
                return
            yield self._state.unplanned_s

    def _step(self, until_s: float, steps: int) -> bool:
        """Let the next thing happen, if it does before this time; False otherwise."""
        at = self._world.next_at
        if at is None or at > self._began + until_s or self.steps >= steps:
            return False
        self.steps += 1
        return self._world.step()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReplicaOrder):
                self._stages[effect.replica].order(effect.order)
            elif isinstance(effect, Order):
                for stages in self._stages:
                    stages.order(effect)
            elif isinstance(effect, Tokens) and effect.rid == self._candidate and self._first_token_at is None:
                self._first_token_at = self._world.now

    def _coming(self) -> Iterator[tuple[float, RecentArrival]]:
        """Requests to come, with the times at which they do, without end."""
        found, window_s = self._state.promises.recent.stretch(self._began)
        if not found or window_s <= 0:
            return
        drawing = self._world.random
        offset = drawing.random() * window_s
        first = found[0].at
        index = next((number for number, each in enumerate(found) if each.at - first >= offset), len(found))
        at = self._began - offset
        while True:
            for arrival in found[index:]:
                if self._arriving >= 1.0 or drawing.random() < self._arriving:
                    yield at + arrival.at - first, arrival
            index, at = 0, at + window_s

    def _await(self, coming: tuple[float, RecentArrival] | None, others: Iterator[tuple[float, RecentArrival]]) -> None:
        if coming is None:
            return
        at, arrival = coming

        def arrive() -> None:
            self._await(next(others, None), others)
            self._count += 1
            self._submit(f"{PEER}-{self._count}", arrival, self._tokens(arrival.load))

        self._world.at(at, arrive)

    def _submit(self, rid: str, arrival: RecentArrival, tokens: int) -> None:
        """A request comes. If its KV goes to a peer, that has reserved."""
        route: AnyRoute = DecodeHere() if arrival.max_tokens > 1 else SendTo(rid) if arrival.sends else Discard()
        if isinstance(route, SendTo):
            self._reserve(rid, tokens, 1)
        generated = self._state.promises.recent.generated
        drawn = self._world.random.choice(generated) if arrival.max_tokens > 1 and generated else arrival.max_tokens
        limit = min(arrival.max_tokens, max(1, drawn)) if arrival.max_tokens > 1 else 1 + arrival.sends
        sampling = SamplingParams(temperature=0.0, max_tokens=limit)
        terms = RequestTerms(tenant=arrival.tenant, priority=arrival.priority, slo_ttft_s=arrival.objective_s)
        prompt = self._prompt(tokens)
        self._driver.handle(Submit(rid=rid, prompt=prompt, sampling=sampling, route=route, terms=terms))

    def _prompt(self, tokens: int) -> bytes:
        """Token ids of a prompt that no other begins with."""
        vocabulary = self._state.engine.vocab_size or 1 << 31
        head = [self._world.random.randrange(vocabulary) for _ in range(min(4, tokens))]
        return pack(head) + bytes(4 * (tokens - len(head)))

    def _tokens(self, load: Load) -> int:
        """Length of an uncached prompt with as much work as this load: the root of a·l² + b·l = its seconds."""
        a, b = self._state.replicas[0].costs.per_token
        seconds = a * load.squares + b * load.tokens
        if a <= 0 or b <= 0:
            return max(1, load.tokens)
        return max(1, round(2 * seconds / (b + sqrt(b * b + 4 * a * seconds))))

    def _alike(self, work_s: float) -> RecentArrival | None:
        """One of the recent requests whose work is next to this, at random among those within a factor of 4."""
        found, _ = self._state.promises.recent.stretch(self._began)
        if not found:
            return None
        costs = self._state.replicas[0].costs
        drawn = self._world.random.sample(found, min(LOOKED_AT, len(found)))
        return next((each for each in drawn if work_s <= 4 * costs.load_s(each.load) <= 16 * work_s), found[-1])

    def _answer_peers(self) -> None:
        """Peers reserve what waits for them, after as long as they took lately."""
        recent, drawing = self._state.promises.recent, self._world.random
        size = self._state.config.page_size
        geometry = Geometry("float32", 1, 1, 1, size)
        terms = PeerTerms(session=PEER, geometries=(geometry,), window_bytes=WINDOW_BYTES)
        self._driver.handle(PeerJoined(name=PEER, terms=terms))
        for request in list(self._state.requests):
            if isinstance(request.route, SendTo) and request.outgoing is None and not request.ended:
                computed = request.phase is Phase.INFLIGHT
                seen = recent.handed_over_s if computed else recent.reserved_s
                after = drawing.choice(seen) if seen else 0.0
                self._world.at(self._world.now + after, lambda request=request: self._come(request))  # type: ignore[misc]

    def _come(self, request: Request) -> None:
        """The peer of a request reserves it, unless it has ended."""
        if request.outgoing is None and not request.ended:
            self._reserve(request.ticket, request.prompt_tokens, 1)

    def _reserve(self, ticket: str, tokens: int, generation: int) -> None:
        pages = pack(range(ceil_div(tokens, self._state.config.page_size)))
        reservation = Reservation(
            ticket=ticket, generation=generation, prompt_tokens=tokens, cached_tokens=0, pages=pages, row=0
        )
        self._driver.handle(PeerReserved(session=PEER, reservation=reservation))

    def _end_decoding(self) -> None:
        """Requests that decode here end after as many tokens as others did lately."""
        generated = self._state.promises.recent.generated
        for request in self._state.requests if generated else ():
            if request.decodes_here and not request.ended:
                drawn = request.prompt_tokens + self._world.random.choice(generated)
                request.token_limit = min(request.token_limit, max(drawn, request.length + 1, request.planned + 1))
