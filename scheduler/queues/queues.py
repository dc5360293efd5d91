"""The queues of requests, and the counts by phase that follow from their moves."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from headrace.core.messages.frontend import Submit
from headrace.core.shares import Shares
from headrace.core.types.packed import packed_length
from headrace.scheduler.costs.backlog import UNRANKED, Backlog, RankOf
from headrace.scheduler.costs.cost_model import NOTHING, CostModel, Load
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.policies.policy import Policy
from headrace.scheduler.requests.parts import QueueEntry
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.telemetry.metrics import QUEUES

NONE_QUEUED = dict.fromkeys(QUEUES, 0)
QUEUED = (Phase.BOOTSTRAP, Phase.WAITING)
STARTED = (Phase.RUNNING, Phase.GENERATING)


class QueuedShares:
    """What the tenants of a server have queued, of all replicas: requests, and prompt tokens that no plan has begun, by
    the name of the API key. Keys without a name are one tenant, whatever cache salts come with them: clients choose
    these."""

    def __init__(self) -> None:
        self.requests = Shares()
        self.tokens = Shares()

    def count(self, request: Request, sign: int) -> None:
        """A request enters its phase (1), or leaves it (-1)."""
        if request.phase in QUEUED and not request.open:
            self.requests.add(request.terms.tenant, sign)
            self.tokens.add(request.terms.tenant, sign * request.prompt_tokens)

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Counts that are wrong."""
        queued = [request for request in requests if request.phase in QUEUED and not request.open]
        counted = (self.requests.total, self.tokens.total)
        if counted != (found := (len(queued), sum(request.prompt_tokens for request in queued))):
            yield f"{counted} requests and tokens counted as queued by tenants; there are {found}"


class Queues:
    """Who can be planned next. A request in no queue waits for a peer, a stage or a plan in flight.

    policy: waiting ──RUNNING──► prefilling ──all planned──► decoding ──preempt()──► preempting ──requeue()──► policy
    to_fetch ───────FETCHING───────────────────────────────────▲
    to_hand_over ───INFLIGHT
    open ───────────RUNNING──► preempting, for one short pass ──requeue()──► open

    Queues are keyed by arrival number. Only the methods below change them, and keep the counts right.
    """

    def __init__(
        self,
        policy: Policy,
        to_fetch: Policy,
        open_prompts: Policy,
        costs: CostModel,
        cache: KvCache,
        rank_of: RankOf,
        awaiting_row: dict[int, Request],
        tenants: QueuedShares,
    ) -> None:
        """to_fetch, open_prompts: other policies of the same kind; the former is not used when prompts are started
        strictly in order. awaiting_row, tenants: shared with the queues of other replicas."""
        self.policy = policy
        """What is to be computed: phase WAITING, and phase RUNNING until it is wholly planned."""

        self.to_fetch = policy if policy.strict else to_fetch
        """Phase WAITING, and its KV is to be fetched. The same object as policy when all are started in one order."""

        self.open = open_prompts
        """Pieces of open prompts that wait. They are in none of the counts below."""

        self.to_hand_over: dict[int, Request] = {}
        """Phase WAITING, and its KV is in the prefix cache, tiers included: it is given its pages in no plan."""

        self.prefilling: dict[int, Request] = {}
        """Phase RUNNING and not wholly planned: has its pages, and may be paused for others."""

        self._costs = costs
        self._cache = cache
        self._key_version = costs.key_version

        self.decoding: OrderedDict[int, Request] = OrderedDict()
        """May get a decode row in the next plan, least recently planned first."""

        self.preempting: dict[int, Request] = {}
        """Have to give up their pages, once their plans in flight are done (lifecycle/preemption.py)."""

        self.awaiting_row = awaiting_row
        """Were started before a peer reserved; a peer has since, and they need a metadata row. Of all replicas, which
        share the rows."""

        self.requests = dict.fromkeys(QUEUES, 0)
        """Requests by phase."""

        self.tokens = dict.fromkeys(QUEUES, 0)
        """Prompt tokens of the requests in a phase."""

        self.unplanned = 0
        """Tokens of all requests that are in no plan and not being fetched."""

        self.load = NOTHING
        """What is left to compute of all requests."""

        self.backlog = Backlog()
        """The same, by rank."""

        self._rank_of = rank_of
        self._tenants = tenants

    @property
    def runnable(self) -> bool:
        """Whether there may be anything to plan."""
        return bool(self.policy or self.decoding)

    @property
    def rows(self) -> int:
        """Rows that a plan of unlimited size would have."""
        return len(self.prefilling) + len(self.decoding)

    def admit(self, request: Request, now: float) -> None:
        """Take in a new request, in the phase that it has."""
        self._count(request, 1)
        self.unplanned += request.unplanned
        if not (request.to_fetch or request.from_cache) and request.queued.cache_version != self._cache.tree_version:
            self._look_up(request)
        self.recount(request)
        if request.phase is Phase.WAITING:
            self._push(request, now)

    def withdraw(self, request: Request) -> None:
        """Give up a request in no queue, which goes to another replica."""
        self._count(request, -1)
        self.unplanned -= request.unplanned
        self.load = self.load.minus(request.queued.load)
        self.backlog.move(request.queued.rank, request.queued.load, UNRANKED, NOTHING)
        request.queued = QueueEntry()

    def take_over(self, request: Request) -> None:
        """Count a request that another replica has withdrawn."""
        self._count(request, 1)
        self.unplanned += request.unplanned
        if not request.to_fetch:
            self._look_up(request)
        self.recount(request)

    def cached(self, submit: Submit) -> int:
        """Positions of a prompt that is not admitted yet which the prefix cache has."""
        cacheable = submit.sampling.cacheable(packed_length(submit.prompt))
        return self._cache.cached_positions(submit.prompt, submit.terms.prefix_salt, submit.images, cacheable)

    def move(self, request: Request, phase: Phase, now: float) -> float:
        """Move a request to another phase, and into the queue of that phase. Returns the seconds that it spent in the
        phase before."""
        left, unplanned = request.phase, request.unplanned
        self._count(request, -1)
        if left is Phase.WAITING and phase is Phase.RUNNING:
            self._computes(request).start(request)
        elif self.to_hand_over.pop(request.arrival, None) is None and left is Phase.WAITING:
            (self.to_fetch if request in self.to_fetch else self._computes(request)).remove(request)
        elapsed = request.enter(phase, now)
        if request.ended:
            self._remove(request)
            self.unplanned -= unplanned
            self.recount(request)
            return elapsed
        self._count(request, 1)
        if phase is Phase.WAITING:
            self.awaiting_row.pop(request.arrival, None)  # it is leased one with its pages
            self._push(request, now)
        elif phase is Phase.RUNNING:
            self.prefilling[request.arrival] = request
        return elapsed

    def plan(self, request: Request, count: int) -> None:
        """The next count positions of a request are in a plan, found in the cache or being fetched."""
        if request.planned < request.target and not request.open:
            self.unplanned -= count
        request.planned += count
        self.recount(request)

    def recount(self, request: Request) -> None:
        """Count what is left to compute of a request, after anything that it follows from has changed."""
        load, entry = request.load, request.queued
        if load != entry.load:
            self.load = self.load.minus(entry.load).plus(load)
            self._rank(request, load)
            entry.load = load

    def look_up(self, request: Request, now: float) -> bool:
        """Look a waiting request up in the prefix cache again, if that has changed. Returns whether it has another
        place in the order now."""
        if request.queued.cache_version == self._cache.tree_version:
            return False
        before = request.work
        self._look_up(request)
        self.recount(request)
        if request.work == before:
            return False
        self.revise(request, now)
        return True

    def revise(self, request: Request, now: float) -> None:
        """Tell the policy what a request that is to be computed has left."""
        self._computes(request).revise(request, self._work_s(request), now)

    def renew_keys(self, now: float) -> None:
        """Tell the policy of every request anew, if seconds are counted otherwise than before."""
        if self._key_version != self._costs.key_version:
            self._key_version = self._costs.key_version
            for request in self.policy:
                self._rank(request, request.queued.load)
                self.revise(request, now)

    def charge(self, request: Request, count: int) -> float:
        """The tenant of a request is served: the next count positions are planned. Returns their predicted seconds."""
        seconds = self._costs.load_s(Load.between(request.planned, request.planned + count))
        self._computes(request).charge(request, seconds)
        return seconds

    def peer_came(self, request: Request, now: float) -> None:
        """A request that gave way to others need not any more."""
        if request in self.policy:
            self.revise(request, now)

    def end_prefill(self, request: Request) -> None:
        """The whole prompt is planned."""
        del self.prefilling[request.arrival]
        self._computes(request).remove(request)

    def start_decoding(self, request: Request) -> None:
        """Let a request have decode rows from the next plan on."""
        self.decoding[request.arrival] = request

    def decoded(self, request: Request) -> None:
        """A decode row of the request was planned: it goes to the end of the queue."""
        self.decoding.move_to_end(request.arrival)

    def stop_decoding(self, request: Request) -> None:
        """The request's last position is planned."""
        del self.decoding[request.arrival]

    def preempt(self, request: Request) -> None:
        """Have no more of a request planned, so that it gives up its pages."""
        if request.arrival in self.prefilling:
            self.end_prefill(request)
        self.decoding.pop(request.arrival, None)
        self.preempting[request.arrival] = request

    def requeue(self, request: Request) -> None:
        """A preempted request begins again, with all its tokens as the prompt, or all but the last one if their KV is
        to be fetched: that one is decoded. Its phase is moved by the caller."""
        self.preempting.pop(request.arrival, None)
        before = request.unplanned
        request.planned = request.computed = 0
        self._look_up(request)
        request.on_stages.next_token = False
        if not request.open:
            request.target = request.length - request.to_fetch
        self.unplanned += request.unplanned - before
        self.recount(request)

    def restart(self, request: Request) -> None:
        """A request that was started, and could not be given its cached pages, begins again. Its phase is moved by the
        caller."""
        self.end_prefill(request)
        self.preempting[request.arrival] = request
        self.requeue(request)

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests in a queue that is not that of their phase, and counts that are wrong."""
        counts, tokens = NONE_QUEUED.copy(), NONE_QUEUED.copy()
        unplanned, squares, left, waiting_open, arrivals = 0, 0, 0, 0, set()
        for request in requests:
            arrivals.add(request.arrival)
            if not request.ended:
                unplanned += request.unplanned
                own = request.load
                squares, left = squares + own.squares, left + own.tokens
                counts[request.phase] += not request.open
                tokens[request.phase] += 0 if request.open else request.prompt_tokens
                waiting_open += request.open and request.phase is Phase.WAITING
            yield from self._check_request(request)
        if counts != self.requests or tokens != self.tokens:
            yield f"queues count {self.requests}, {self.tokens}; there are {counts}, {tokens}"
        if unplanned != self.unplanned:
            yield f"{self.unplanned} unplanned tokens counted, {unplanned} found"
        load = (squares, left)
        if load != self.load or load != self.backlog.total():
            yield f"{self.load} counted as to be computed, {self.backlog.total()} by rank, {Load(*load)} found"
        listed = len(self.policy) + (0 if self.to_fetch is self.policy else len(self.to_fetch)) + len(self.to_hand_over)
        if listed != (expected := counts[Phase.WAITING] + len(self.prefilling)):
            yield f"{listed} requests are ordered by the policy; {expected} wait or are half done"
        if len(self.open) != waiting_open:
            yield f"{len(self.open)} pieces of open prompts are ordered; {waiting_open} wait"
        for queue in (self.to_hand_over, self.prefilling, self.decoding, self.preempting):
            if queue and (unknown := queue.keys() - arrivals):
                yield f"requests {unknown} are queued and not known"

    def _check_request(self, request: Request) -> list[str]:
        """What is wrong with the queues of one request. Runs after every event of a simulation."""
        phase, arrival, found = request.phase, request.arrival, []
        ordered = any(request in policy for policy in (self.policy, self.to_fetch, self.open))
        ordered = ordered or arrival in self.to_hand_over
        prefilling, decoding, preempting = (
            arrival in self.prefilling, arrival in self.decoding, arrival in self.preempting)  # fmt: skip
        if ordered != (phase is Phase.WAITING or prefilling):
            found.append(f"is {'' if ordered else 'not '}ordered by the policy")
        if prefilling and phase is not Phase.RUNNING:
            found.append("is among the prefills")
        if decoding and phase not in STARTED:
            found.append("is among the decoding")
        if preempting and phase not in STARTED:
            found.append("is among the preempted")
        if prefilling + decoding + preempting > 1:
            found.append("is in several queues")
        if arrival in self.awaiting_row and (request.lease is None or not request.early_prefill):
            found.append("waits for a metadata row")
        return [f"{request.rid} ({phase.value}) {text}" for text in found]

    def _rank(self, request: Request, load: Load) -> None:
        """Count a request's load under the rank that it has with it."""
        terms, entry = request.terms, request.queued
        old, entry.rank = (
            entry.rank,
            self._rank_of(terms.priority, terms.slo_ttft_s, self._costs.key_s(load)),
        )
        self.backlog.move(old, entry.load, entry.rank, load)

    def _push(self, request: Request, now: float) -> None:
        if request.from_cache:
            self.to_hand_over[request.arrival] = request
            return
        policy = self.to_fetch if request.to_fetch else self._computes(request)
        policy.push(request, self._work_s(request), now)

    def _work_s(self, request: Request) -> float:
        """Predicted seconds of prefill that a request has left, by which the policy orders."""
        return self._costs.key_s(request.work if request.open else request.queued.load)

    def _computes(self, request: Request) -> Policy:
        """The queue of what is to be computed that a request belongs to."""
        return self.open if request.open else self.policy

    def _look_up(self, request: Request) -> None:
        """Note how much of a request's prompt is cached."""
        entry = request.queued
        entry.cache_version = self._cache.tree_version
        entry.expected_cached = self._cache.cached_positions(
            request.tokens, request.salt, request.images, request.cacheable
        )

    def _count(self, request: Request, sign: int) -> None:
        if request.open:
            return
        self.requests[request.phase] += sign
        self.tokens[request.phase] += sign * request.prompt_tokens
        self._tenants.count(request, sign)

    def _remove(self, request: Request) -> None:
        self.awaiting_row.pop(request.arrival, None)
        if self.prefilling.pop(request.arrival, None) is not None:
            self._computes(request).remove(request)
        self.decoding.pop(request.arrival, None)
        self.preempting.pop(request.arrival, None)
