"""The queues of requests, and the counts by phase that follow from their moves."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from headrace.scheduler.state.metrics import QUEUES
from headrace.scheduler.state.policy import Policy
from headrace.scheduler.state.record import Phase, Request


class Queues:
    """Who can be planned next. A request in no queue waits for a peer, a stage or a plan in flight.

    waiting ──RUNNING──► prefilling ──all planned──► decoding ──preempt()──► preempting ──requeue()──► waiting
       └────FETCHING───────────────────────────────────▲

    Queues are keyed by arrival number. Only the methods below change them, and keep the counts right.
    """

    def __init__(self, waiting: Policy) -> None:
        self.waiting = waiting
        """Phase WAITING, in the order of the policy."""

        self.prefilling: dict[int, Request] = {}
        """Phase RUNNING and not wholly planned, in the order in which they were started."""

        self.decoding: OrderedDict[int, Request] = OrderedDict()
        """May get a decode row in the next plan, least recently planned first."""

        self.preempting: dict[int, Request] = {}
        """Have to give up their pages, once their plans in flight are done."""

        self.awaiting_row: dict[int, Request] = {}
        """Were started before a peer reserved; a peer has since, and they need a metadata row."""

        self.requests = dict.fromkeys(QUEUES, 0)
        """Requests by phase."""

        self.tokens = dict.fromkeys(QUEUES, 0)
        """Prompt tokens of the requests in a phase."""

        self.unplanned = 0
        """Tokens of all requests that are in no plan and not being fetched."""

    @property
    def rows(self) -> int:
        """Rows that a plan of unlimited size would have."""
        return len(self.prefilling) + len(self.decoding)

    def admit(self, request: Request) -> None:
        """Take in a new request, in the phase that it has."""
        self._count(request, 1)
        self.unplanned += request.unplanned
        if request.phase is Phase.WAITING:
            self.waiting.push(request)

    def move(self, request: Request, phase: Phase, now: float) -> float:
        """Move a request to another phase, and into the queue of that phase. Returns the seconds that it spent in the
        phase before."""
        left, unplanned = request.phase, request.unplanned
        self._count(request, -1)
        if left is Phase.WAITING:
            self.waiting.remove(request)
        elapsed = request.enter(phase, now)
        if request.ended:
            self._remove(request)
            self.unplanned -= unplanned
            return elapsed
        self._count(request, 1)
        if phase is Phase.WAITING:
            self.waiting.push(request)
        elif phase is Phase.RUNNING:
            self.prefilling[request.arrival] = request
        return elapsed

    def plan(self, request: Request, count: int) -> None:
        """The next count positions of a request are in a plan, found in the cache or being fetched."""
        if request.planned < request.target:
            self.unplanned -= count
        request.planned += count

    def end_prefill(self, request: Request) -> None:
        """The whole prompt is planned."""
        del self.prefilling[request.arrival]

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
        """Take a request out of decoding, so that it gives up its pages."""
        del self.decoding[request.arrival]
        self.preempting[request.arrival] = request

    def requeue(self, request: Request) -> None:
        """A preempted request begins again, with all its tokens as the prompt. Its phase is moved by the caller."""
        del self.preempting[request.arrival]
        before = request.unplanned
        request.planned = request.computed = 0
        request.next_token_on_stages = False
        request.target = request.length
        self.unplanned += request.unplanned - before

    def restart(self, request: Request) -> None:
        """A request that was started, and could not be given its cached pages, begins again. Its phase is moved by the
        caller."""
        self.end_prefill(request)
        self.preempting[request.arrival] = request
        self.requeue(request)

    def await_row(self, request: Request) -> None:
        """Queue a request for a metadata row."""
        self.awaiting_row[request.arrival] = request

    def pop_awaiting_row(self) -> Request:
        """Take out the request that has waited longest for a metadata row. Raises StopIteration when none waits."""
        return self.awaiting_row.pop(next(iter(self.awaiting_row)))

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests in a queue that is not that of their phase, and counts that are wrong."""
        counts, tokens = dict.fromkeys(QUEUES, 0), dict.fromkeys(QUEUES, 0)
        unplanned, arrivals = 0, set()
        for request in requests:
            arrivals.add(request.arrival)
            unplanned += request.unplanned
            if not request.ended:
                counts[request.phase] += 1
                tokens[request.phase] += request.prompt_tokens
            yield from self._check_request(request)
        if (counts, tokens) != (self.requests, self.tokens):
            yield f"queues count {self.requests}, {self.tokens}; there are {counts}, {tokens}"
        if unplanned != self.unplanned:
            yield f"{self.unplanned} unplanned tokens counted, {unplanned} found"
        if len(self.waiting) != counts[Phase.WAITING]:
            yield f"{len(self.waiting)} requests in the waiting queue, {counts[Phase.WAITING]} are waiting"
        for queue in (self.prefilling, self.decoding, self.preempting, self.awaiting_row):
            if unknown := queue.keys() - arrivals:
                yield f"requests {unknown} are queued and not known"

    def _check_request(self, request: Request) -> Iterator[str]:
        name, phase, arrival = f"{request.rid} ({request.phase.value})", request.phase, request.arrival
        if (request in self.waiting) != (phase is Phase.WAITING):
            yield f"{name} is {'' if request in self.waiting else 'not '}in the waiting queue"
        if arrival in self.prefilling and phase is not Phase.RUNNING:
            yield f"{name} is among the prefills"
        if arrival in self.decoding and phase not in (Phase.RUNNING, Phase.GENERATING):
            yield f"{name} is among the decoding"
        if arrival in self.preempting and phase not in (Phase.RUNNING, Phase.GENERATING):
            yield f"{name} is among the preempted"
        if sum(arrival in queue for queue in (self.prefilling, self.decoding, self.preempting)) > 1:
            yield f"{name} is in several queues"
        if arrival in self.awaiting_row and (request.lease is None or not request.early_prefill):
            yield f"{name} waits for a metadata row"

    def _count(self, request: Request, sign: int) -> None:
        self.requests[request.phase] += sign
        self.tokens[request.phase] += sign * request.prompt_tokens

    def _remove(self, request: Request) -> None:
        self.awaiting_row.pop(request.arrival, None)
        self.prefilling.pop(request.arrival, None)
        self.decoding.pop(request.arrival, None)
        self.preempting.pop(request.arrival, None)
