"""Plans in flight: forward passes that were ordered and that the last stage has not reported done."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.core.messages.orders import PlanRow
from headrace.scheduler.costs.cost_model import NOTHING, Load
from headrace.scheduler.requests.record import Request


@dataclass(slots=True, frozen=True)
class PlannedRow:
    """What a plan does for one request."""

    request: Request
    serial: int
    """The request's serial when the plan was made."""

    end: int
    """Positions below this one are computed when the plan is done."""

    sampled: bool
    """The plan samples the token at position end."""


@dataclass(slots=True, eq=False)
class Plan:
    """One forward pass in flight."""

    seq: int
    """Number of its Forward in the stream of orders."""

    tokens: int
    rows: tuple[PlannedRow, ...]
    load: Load = NOTHING
    """What its rows cost."""

    decode_rows: int = 0
    pieces: bool = False
    """It computes pieces of open prompts, and nothing else."""

    gives_way: bool = False
    """It is cancelled when there is something else to compute, which therefore does not wait for it."""

    cancelled: bool = False
    """What it computes is not used."""

    begun: float = 0.0
    """Time at which the last stage had nothing to do before it: its order, or the end of the plan before."""

    started: float | None = None
    """Time at which the first stage began to compute it, once that is known."""

    reported: set[int] = field(default_factory=set)
    """Stages that have computed it."""

    sends: list[tuple[Request, int]] = field(default_factory=list)
    """Chunks, by request and number, that the stages send as soon as they have computed it."""

    def cancel(self) -> None:
        """What it computes is not used, and takes no time."""
        self.cancelled, self.tokens, self.load = True, 0, NOTHING


class BatchBuilder:
    """The rows of the next plan."""

    def __init__(self, budget: int, slots: int, *, pieces: bool = False) -> None:
        self._pieces = pieces
        self.budget = budget
        """Tokens that may be added."""

        self.slots = slots
        """Rows that may be added."""

        self.rows: list[PlanRow] = []
        self._planned: list[PlannedRow] = []
        self._load = NOTHING
        self._decode_rows = 0

    @property
    def full(self) -> bool:
        """No token or no row may be added."""
        return self.budget <= 0 or self.slots <= 0

    def add(self, row: PlanRow, request: Request, end: int) -> None:
        """Add a row of a request, whose positions below end are computed with it."""
        self.rows.append(row)
        self._planned.append(PlannedRow(request, request.serial, end, row.sample is not None))
        request.in_flight += 1
        self._load = self._load.plus(Load.between(row.start, end))
        self._decode_rows += row.start >= request.target
        self.budget -= row.count
        self.slots -= 1

    def build(self, seq: int) -> Plan:
        """The plan with these rows."""
        load = self._load
        rows, decode_rows = tuple(self._planned), self._decode_rows
        return Plan(seq=seq, tokens=load.tokens, rows=rows, load=load, decode_rows=decode_rows, pieces=self._pieces)


class PlanTable:
    """The plans in flight, oldest first. Keeps Request.in_flight: a request in a plan keeps its pages."""

    def __init__(self, first_stage: int = 0) -> None:
        """first_stage: the rank that computes a plan first."""
        self._first_stage = first_stage
        self._plans: dict[int, Plan] = {}
        self.first_begun = 0.0
        """Time at which the first stage had nothing to do before the oldest of the plans that it has not reported."""

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._plans.values())

    @property
    def oldest(self) -> Plan | None:
        """The plan that has to be done next."""
        return next(iter(self._plans.values()), None)

    def add(self, plan: Plan, now: float) -> None:
        """A plan was ordered."""
        plan.begun = now
        if next(self.of_first_stage(), None) is None:
            self.first_begun = now
        self._plans[plan.seq] = plan

    def of_first_stage(self) -> Iterator[Plan]:
        """Those that the first stage has not reported, oldest first."""
        return (plan for plan in self if self._first_stage not in plan.reported)

    def reported(self, plan: Plan, stage: int, duration_s: float, now: float) -> None:
        """A stage that is not the last has computed a plan in so many seconds."""
        plan.reported.add(stage)
        if stage == self._first_stage:
            self.first_begun = now
            plan.started = now - duration_s

    def get(self, seq: int) -> Plan | None:
        """The plan in flight with this number."""
        return self._plans.get(seq)

    def pop(self, seq: int, duration_s: float, now: float) -> Plan | None:
        """Take out a plan that is done, for which the last stage took so many seconds. Its rows still count, until
        leave() is called for each of them."""
        plan = self._plans.pop(seq, None)
        if plan is None:
            return None
        if self._first_stage not in plan.reported:
            self.first_begun = now
        if plan.started is None:
            plan.started = now - duration_s
        if (following := self.oldest) is not None:
            following.begun = now
        return plan

    def leave(self, row: PlannedRow) -> None:
        """A row of a plan that is done no longer keeps its request's pages."""
        row.request.in_flight -= 1

    def clear(self) -> None:
        """Forget all plans: the stages that computed them are gone."""
        for plan in self._plans.values():
            for row in plan.rows:
                row.request.in_flight = 0
        self._plans.clear()

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests that count another number of plans than contain them."""
        counts: dict[int, int] = {}
        for plan in self._plans.values():
            for row in plan.rows:
                counts[row.request.arrival] = counts.get(row.request.arrival, 0) + 1
        for request in requests:
            if request.in_flight != (found := counts.pop(request.arrival, 0)):
                yield f"{request.rid} is in {found} plans and counts {request.in_flight}"
        if counts:
            yield f"requests {set(counts)} are in plans and not known"
