"""What a replay comes to: time to first token by length, goodput, utilisation and cache hits."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from headrace.core.types.requests.request import Promise
from headrace.scheduler.costs.chunking import Cost
from headrace.tools.output import quantile
from headrace.tools.simulate.objectives import CLASSES, Objective, length_class
from headrace.tools.simulate.replay.replay import ReplayOutcome, ReplayResult

MOST_POINTS = 6000


class Latency(msgspec.Struct, frozen=True):
    """Time to first token of the requests of a class that got one, seconds; None where none did."""

    requests: int
    """All of the class, those without a first token included."""

    p50_s: float | None
    p99_s: float | None


class MeanAndTail(msgspec.Struct, frozen=True):
    """Mean and 99th percentile, seconds; None where there is nothing."""

    mean_s: float | None
    p99_s: float | None


class DecodeSummary(msgspec.Struct, frozen=True):
    """The figures of decode servers."""

    token_s: MeanAndTail
    """Seconds per token after the first one, by request."""

    total: MeanAndTail
    """From arrival to the last token."""

    remote: float
    """Share of requests whose prompt a prefill server has computed."""


class PromisesOfClass(msgspec.Struct, frozen=True):
    """Promised times to first token of prompts of one class; None where there are none."""

    promised: int
    kept: float | None
    """Share of them."""

    ratio: float | None
    """Promised time divided by the actual one, median."""


class PromisePoint(msgspec.Struct, frozen=True, array_like=True):
    """One promise, for the picture."""

    arrival_s: float
    tokens: int
    bound_s: float
    ttft_s: float


class PromiseSummary(msgspec.Struct, frozen=True):
    """What became of the promises."""

    classes: dict[str, PromisesOfClass]
    """By length class, and of all."""

    points: tuple[PromisePoint, ...]
    """In the order of arrival; every second, third … where there are more than MOST_POINTS."""


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one replay."""

    ttft: dict[str, Latency]
    """By length class, and of all."""

    mean_s: float | None
    """Mean time to first token."""

    longest_s: float | None
    """Longest time to first token."""

    goodput: float
    """Share of all offered requests whose first token came within its objective."""

    goodput_tokens: float
    """The same, each request weighted by its prompt tokens."""

    tenants: dict[str, float]
    """Goodput by tenant, those of most requests first; empty where the trace has none."""

    refused: dict[str, int]
    """Requests that ended with an error, by code."""

    retried: int
    """Requests that came again after they had been refused."""

    first_retry_accepted: float | None
    """Share of those that were accepted when they first came again; None of none."""

    utilisation: float
    """Share of the time in which the busiest stage computed, mean of the replicas."""

    hits: float
    """Share of prompt tokens that were found in the prefix cache."""

    tokens_per_s: float
    """Prompt tokens of requests with a first token, per second of the replay, all replicas."""

    seconds: float
    """Virtual time from the first arrival to the last first token; with decode servers, to the last token."""

    busy_s: float = 0.0
    """Seconds of computing of the busiest stage, sum of the replicas."""

    tenant_hits: dict[str, float] = {}
    """hits by tenant; empty where the trace has none."""

    turns: dict[str, MeanAndTail] = {}
    """Time to first token by turn of the conversation, those after the first together, too; empty where turns were not
    looked for."""

    offers: dict[str, int] = {}
    """KV of turns that decode servers have offered back: how much was taken and has come, and why the rest has not."""

    decode: DecodeSummary | None = None
    """Of a replay with decode servers."""

    promises: PromiseSummary | None = None
    """None where nothing was promised."""


def summarise(result: ReplayResult, objective: Objective, cost: Cost, tpot_s: float | None = None) -> ReplaySummary:
    """cost: of the whole engine, which the objective may refer to. tpot_s: with decode servers, seconds per token after
    the first one that are good, too."""
    outcomes = result.outcomes
    served = [outcome for outcome in outcomes if outcome.first_token_s is not None]
    times = sorted(outcome.first_token_s for outcome in served if outcome.first_token_s is not None)
    good = [outcome for outcome in outcomes if _is_good(outcome, objective, cost, tpot_s)]
    tokens = sum(outcome.tokens for outcome in outcomes)
    retried = [outcome for outcome in outcomes if outcome.attempts > 1]
    groups = {name: [each for each in outcomes if length_class(each.tokens) == name] for name in CLASSES}
    seconds = result.seconds
    return ReplaySummary(
        ttft={name: _latency(group) for name, group in groups.items()} | {"all": _latency(outcomes)},
        mean_s=sum(times) / len(times) if times else None,
        longest_s=times[-1] if times else None,
        goodput=len(good) / len(outcomes),
        tenants=_tenants(outcomes, good),
        goodput_tokens=sum(outcome.tokens for outcome in good) / tokens,
        refused=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        retried=len(retried),
        first_retry_accepted=sum(each.attempts == 2 and not each.error for each in retried) / len(retried)
        if retried
        else None,
        utilisation=sum(result.busy_s) / len(result.busy_s) / seconds if seconds else 0.0,
        hits=sum(outcome.cached_tokens for outcome in served) / tokens,
        tokens_per_s=sum(outcome.tokens for outcome in served) / seconds if seconds else 0.0,
        seconds=seconds,
        busy_s=sum(result.busy_s),
        tenant_hits=_hits_by_tenant(outcomes),
        turns=_by_turn(outcomes),
        offers=result.offers,
        decode=None if tpot_s is None else _decode(outcomes),
        promises=_promises(outcomes),
    )


def _promises(outcomes: Sequence[ReplayOutcome]) -> PromiseSummary | None:
    promised = [(outcome, outcome.promise) for outcome in outcomes if outcome.promise is not None]
    if not promised:
        return None
    groups = {name: [promise for each, promise in promised if length_class(each.tokens) == name] for name in CLASSES}
    groups["all"] = [promise for _, promise in promised]
    points = [PromisePoint(each.arrival_s, each.tokens, one.bound_s, one.ttft_s) for each, one in promised]
    step = -(-len(points) // MOST_POINTS)
    return PromiseSummary({name: _of_class(group) for name, group in groups.items()}, tuple(points[::step]))


def _of_class(promises: Sequence[Promise]) -> PromisesOfClass:
    if not promises:
        return PromisesOfClass(0, None, None)
    ratios = sorted(promise.bound_s / promise.ttft_s for promise in promises)
    kept = sum(promise.kept for promise in promises) / len(promises)
    return PromisesOfClass(len(promises), kept, quantile(ratios, 0.5))


def _decode(outcomes: Sequence[ReplayOutcome]) -> DecodeSummary:
    return DecodeSummary(
        _spread([outcome.token_s for outcome in outcomes]),
        _spread([outcome.end_s for outcome in outcomes]),
        sum(outcome.remote for outcome in outcomes) / len(outcomes),
    )


def _spread(found: Sequence[float | None]) -> MeanAndTail:
    values = sorted(value for value in found if value is not None)
    return MeanAndTail(sum(values) / len(values) if values else None, quantile(values, 0.99))


def _tenants(outcomes: Sequence[ReplayOutcome], good: Sequence[ReplayOutcome]) -> dict[str, float]:
    """Goodput by tenant, those of most requests first."""
    offered = Counter(outcome.tenant for outcome in outcomes)
    if set(offered) == {""}:
        return {}
    within = Counter(outcome.tenant for outcome in good)
    return {tenant: within[tenant] / count for tenant, count in offered.most_common()}


def _hits_by_tenant(outcomes: Sequence[ReplayOutcome]) -> dict[str, float]:
    """Share of prompt tokens that were found in the prefix cache, by tenant, those of most requests first."""
    names = [name for name, _ in Counter(outcome.tenant for outcome in outcomes).most_common()]
    groups = {name: [each for each in outcomes if each.tenant == name] for name in names if names != [""]}
    return {
        name: sum(each.cached_tokens for each in of) / sum(each.tokens for each in of) for name, of in groups.items()
    }


def _by_turn(outcomes: Sequence[ReplayOutcome]) -> dict[str, MeanAndTail]:
    """Seconds to the first token by turn."""
    if not any(outcome.turn for outcome in outcomes):
        return {}
    return {
        name: _spread([outcome.first_token_s for outcome in outcomes if outcome.turn in turns])
        for name, turns in _TURNS.items()
    }


_TURNS: Mapping[str, range] = {
    "1": range(1, 2), "2": range(2, 3), "3": range(3, 4), "4 to 7": range(4, 8), "8 and later": range(8, sys.maxsize),
    "2 and later": range(2, sys.maxsize),
}  # fmt: skip


def _is_good(outcome: ReplayOutcome, objective: Objective, cost: Cost, tpot_s: float | None) -> bool:
    if outcome.first_token_s is None or outcome.first_token_s > objective(outcome.tokens, cost):
        return False
    return tpot_s is None or (outcome.token_s or 0.0) <= tpot_s


def _latency(outcomes: Sequence[ReplayOutcome]) -> Latency:
    times = sorted(outcome.first_token_s for outcome in outcomes if outcome.first_token_s is not None)
    return Latency(len(outcomes), quantile(times, 0.5), quantile(times, 0.99))
