"""The schedules of a soak: which one a seed stands for, and how one is run, named and read again."""

import dataclasses
import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from headrace.testing.scenario import Scenario
from headrace.testing.simulator import simulate
from tests.transfer.schedules import ProtocolSchedule, run_schedule

Case = Scenario | ProtocolSchedule
PROTOCOL = 0.05
"""Share of schedules of the transfer protocol."""

LARGE = 0.005
"""Share of simulations at full length; all others are small, since many small schedules find more than a few large."""


class Result(NamedTuple):
    """How a schedule went."""

    problems: list[str]
    """What was broken; empty when every check passed."""

    actions: int
    """Actions from outside, which can be left out by their number."""

    outcomes: Counter[str]

    replays: Mapping[str, int] = MappingProxyType({})
    """What was recorded and made again."""

    recordings: tuple[str, ...] = ()
    """Files of schedulers that decided otherwise then."""


def case_of(seed: int, protocol: float = PROTOCOL) -> Case:
    """The schedule that a seed stands for, in a soak. protocol: share of those of the transfer protocol."""
    rng = random.Random(seed)
    kind, pick = rng.random(), rng.choice
    if kind < protocol:
        return ProtocolSchedule(seed, steps=None if rng.random() < 0.05 else pick((1, 2, 3, 4)))
    large = kind > 1 - LARGE
    dp = pick((1,) * 16 + (2, 2, 3))
    tiers = rng.random() < 0.06  # pages are loaded again in longer schedules only, where that beats computing them
    return Scenario(
        seed=seed,
        shape=pick(("colocated", "pair")),
        requests=pick((5, 7, 12)) if large else pick((4, 6, 8) if tiers else (1, 1, 1, 2, 2, 2, 3, 4)),
        arrivals_s=pick((0.01, 0.03, 0.05) if tiers else (0.0005, 0.003, 0.01)),
        token_s=0.004 if tiers else pick((0.0005, 0.0005, 0.004)),
        cancel=pick((0.0, 0.3, 0.3, 0.9)),
        stall=pick((0.0, 0.0, 0.0, 0.1)),
        abandon=pick((0.0, 0.05, 0.3)),
        hold=pick((0.0, 0.3, 0.7)),
        other_prompt=pick((0.0, 0.0, 0.0, 0.3)),
        lost_peer=pick((0.0, 0.2, 0.2, 0.9)),
        crash=pick((0.0, 0.05, 0.05, 0.6)),
        has_nan_token=rng.random() < 0.05,
        tiers=tiers,
        tier_faults=pick((0.0, 0.05, 0.2)),
        dp=dp,
        lockstep=dp > 1 and rng.random() < 0.5,
        small=not large,
        rooms=pick((0.0, 0.0, 0.0, 1.0)),
        opened=pick((0.0, 0.0, 0.7)),
        promise=pick(("off", "off", "off", "p90", "p99")),
    )


def run_case(case: Case) -> Result:
    """Run a schedule. Whatever it raises is a problem."""
    try:
        if isinstance(case, ProtocolSchedule):
            steps = 14 if case.steps is None else case.steps
            try:
                return Result([], steps, Counter({f"protocol:{end}": n for end, n in run_schedule(case).items()}))
            except AssertionError as error:
                return Result([f"protocol: {error or 'an assertion failed'}"], steps, Counter())
        report = simulate(case)
        return Result(report.violations, len(report.actions), Counter(report.outcomes))
    except Exception as error:
        return Result([f"raised {type(error).__name__}: {error}"], 0 if isinstance(case, Scenario) else 14, Counter())


def signature(problem: str) -> str:
    """What kind of problem it is: its words without times, names and numbers."""
    text = re.sub(r"^[\d.]+ (colocated|prefill|decode): ", "", problem)
    text = re.sub(r"[\[({].*?[\])}]", "", text)
    text = re.sub(r"\b\w*\d\w*\b", "#", text)
    return " ".join(text.split()[:7])


def changed(case: Case) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    fields = {field.name: (getattr(case, field.name), field.default) for field in dataclasses.fields(case)}
    return {name: value for name, (value, default) in fields.items() if value != default}


def as_json(case: Case) -> str:
    """The schedule as one argument of `python -m tests.soak --only`."""
    return json.dumps({"protocol" if isinstance(case, ProtocolSchedule) else "scenario": changed(case)})


def from_json(text: str) -> Case:
    """Read as_json() again. Raises ValueError for anything else."""
    kinds: dict[str, type[Case]] = {"protocol": ProtocolSchedule, "scenario": Scenario}
    found = json.loads(text)
    if not isinstance(found, dict) or len(found) != 1 or not found.keys() <= kinds.keys():
        raise ValueError('one of {"scenario": {…}} and {"protocol": {…}} is expected')
    ((kind, fields),) = found.items()
    return msgspec.convert(fields, kinds[kind])


def as_code(case: Case) -> str:
    """The schedule as an expression."""
    values = ", ".join(f"{name}={value!r}" for name, value in changed(case).items())
    return f"{type(case).__name__}({values})"
