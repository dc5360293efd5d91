"""Shrinking of a schedule that breaks a guarantee: fewer requests, fewer faults, fewer actions. Deterministic.

settings    each towards its simplest value, with the same seed and then with others: other settings draw other times
actions     what comes from outside is left out, by halves, quarters … single actions, as long as the problem stays
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.testing.scenario import Scenario
from tests.soak.cases import Case, Result, as_code, as_json, run_case, signature
from tests.transfer.schedules import ProtocolSchedule

OTHER_SEEDS = 30
"""Seeds that are tried with simpler settings, beside the one that failed."""

MOST_RUNS = 4000

SIMPLEST: dict[type[Case], tuple[tuple[str, tuple[Any, ...]], ...]] = {
    Scenario: (
        ("small", (True,)),
        ("requests", (1, 2, 3, 4, 5)),
        ("shape", ("colocated",)),
        ("dp", (1, 2)),
        ("lockstep", (False,)),
        ("tiers", (False,)),
        ("crash", (0.0,)),
        ("lost_peer", (0.0,)),
        ("stall", (0.0,)),
        ("cancel", (0.0,)),
        ("hold", (0.0,)),
        ("abandon", (0.0,)),
        ("other_prompt", (0.0,)),
        ("has_nan_token", (False,)),
        ("tier_faults", (0.0,)),
        ("depth", (0,)),
        ("policy", ("fcfs",)),
        ("promise", ("off",)),
    ),
    ProtocolSchedule: (
        ("steps", (1, 2, 3, 4, 6, 8, 10)),
        ("components", (False,)),
        ("loss", (False,)),
        ("repeat", (False,)),
        ("delay", (False,)),
        ("cut", (False,)),
        ("damage", (False,)),
    ),
}


class Shrunk(NamedTuple):
    """The simplest schedule found."""

    case: Case
    problem: str
    runs: int
    """Schedules that were tried."""


class _Search:
    def __init__(self, problem: str, run: Callable[[Case], Result]) -> None:
        self.kind = signature(problem)
        self.problem = problem
        self.runs = 0
        self._run = run

    def fails(self, case: Case) -> bool:
        """Whether the schedule has the same kind of problem; False as well when there were enough tries."""
        if self.runs >= MOST_RUNS:
            return False
        self.runs += 1
        found = next((text for text in self._run(case).problems if signature(text) == self.kind), None)
        self.problem = found or self.problem
        return found is not None


def shrink(case: Case, problem: str, run: Callable[[Case], Result] = run_case) -> Shrunk:
    """Find a simpler schedule with the same kind of problem. The result has it, if case has."""
    search = _Search(problem, run)
    simpler: Case | None = case
    while simpler is not None:
        case, simpler = simpler, next((each for each in _simpler(simpler) if search.fails(each)), None)
    case = _with_fewer_actions(case, run(case).actions, search)
    return Shrunk(case, search.problem, search.runs)


def _simpler(case: Case) -> Iterator[Case]:
    """Schedules with one setting nearer to its simplest value."""
    for name, values in SIMPLEST[type(case)]:
        now = getattr(case, name)
        for value in values[: values.index(now)] if now in values else values:
            if isinstance(value, float) and isinstance(now, float) and now <= value:
                continue
            for seed in range(case.seed, case.seed + 1 + OTHER_SEEDS):
                yield replace(case, seed=seed, **{name: value})


def _with_fewer_actions(case: Case, actions: int, search: _Search) -> Case:
    """Delta debugging over the numbers of the actions."""
    kept = list(range(actions))
    size = len(kept)
    while size >= 1:
        start, less = 0, False
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            candidate = replace(case, skipped=tuple(sorted(set(range(actions)) - set(fewer))))
            if search.fails(candidate):
                case, kept, less = candidate, fewer, True
            else:
                start += size
        if not less or size > len(kept):
            size //= 2
    return case


def command(case: Case) -> str:
    """What to type to run the schedule again."""
    return f"python -m tests.soak --only '{as_json(case)}'"


def regression_test(case: Case, problem: str) -> str:
    """A test of the schedule, as code."""
    about = problem.replace("\\", "").replace('"', "'")[:90]
    if isinstance(case, ProtocolSchedule):
        body = f"    run_schedule({as_code(case)})"
    else:
        body = f"    assert simulate({as_code(case)}).violations == []"
    return f'def test_schedule_{case.seed}() -> None:\n    """Was: {about}"""\n{body}\n'
