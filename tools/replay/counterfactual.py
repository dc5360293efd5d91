"""What other settings would have done: the recorded arrivals, simulated on costs fitted to the recorded passes.

recording ──► arrivals: prompts, lengths, cancels ──┬─► simulated as it was ──► how well the model fits
          ├─► passes: what they computed, seconds ──┤
          │      └► a, b, c of every stage          └─► simulated with other settings
          └─► what was recorded                                     beside each other in one table

Not modelled: what was in the prefix cache when the recording began, transfers, preemption by decode servers that come
late. The time that a request has waited for its decode server is taken as recorded.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_tiers import HOST
from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.cost_fit import solve_nonnegative
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.state.state import State
from headrace.tools.output import quantile, table
from headrace.tools.replay.playback import Progress, nobody
from headrace.tools.replay.timeline import RankPass, RecordedTimeline, RequestLife
from headrace.tools.simulate.options import Point
from headrace.tools.simulate.replay.decode_server import DecodeTier
from headrace.tools.simulate.replay.replay import Replay, ReplaySettings
from headrace.tools.simulate.replay.replica import HostTier
from headrace.tools.simulate.replay.routing import ROUTERS
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest

LEAST_PASSES = 8
RIDGE = 1e-9  # pulls what the passes do not determine to zero
ROUNDS = 12  # of the fit
CLOSE = 1e-3  # relative errors that are no more than this weigh alike
SHORTEST_S = 1e-6  # of a predicted pass


class FittedCosts(msgspec.Struct, frozen=True):
    """What passes take, as the recorded ones say."""

    costs: tuple[Cost, ...]
    """Of each stage: seconds per squared token, per token, per pass."""

    read_s: float
    """Seconds of all stages for each token whose KV a request that decodes reads."""

    between_s: float
    """Mean seconds between two passes of the first stage that was given the later one in time."""

    error: float
    """Median of the relative errors of the passes, without their signs."""

    passes: int


class CounterfactualRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table."""

    name: str
    requests: int
    first_tokens: int
    mean_s: float | None
    """Time to first token."""

    p50_s: float | None
    p99_s: float | None
    longest_s: float | None
    queue_s: float | None
    """Mean seconds in the queue, of requests with a first token."""

    busy_s: float
    """Engine seconds: of the busiest stage, with those between two passes, all servers together."""

    hits: float
    """Share of the prompt tokens of requests with a first token that were cached."""

    failed: dict[str, int]
    """Requests without a first token, by the code of their error."""


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """All that `headrace replay FILE diff` says."""

    recording: str
    fitted: FittedCosts
    servers: int
    """Of the recording: its data-parallel replicas."""

    decodes: bool
    """The recorded server decodes what it computes."""

    left_out: int
    """Requests that were here before the recording began, or wait for their peer at its end: they are no part of the
    figures."""

    rows: Sequence[CounterfactualRow]
    """What was recorded, the same as simulated, and what was asked for."""


def fit(passes: Iterable[RankPass], config: SchedulerConfig) -> FittedCosts:
    """What the passes of a recording say. Raises ConfigError for too few of them."""
    layout, by_stage = config.layout, defaultdict[int, list[RankPass]](list)
    for one in passes:
        place = layout.place(one.rank)
        if place.shard == 0 and one.rows and one.seconds > 0:
            by_stage[place.stage].append(one)
    if min((len(by_stage[stage]) for stage in range(config.stages)), default=0) < LEAST_PASSES:
        found = min(len(by_stage[stage]) for stage in range(config.stages))
        raise ConfigError(
            f"the recording has {found} passes that were computed; diff fits costs to {LEAST_PASSES} or more"
        )
    costs, reads, errors = [], 0.0, []
    for stage in range(config.stages):
        features = [_features(one) for one in by_stage[stage]]
        seconds = [one.seconds for one in by_stage[stage]]
        a, b, c, read = _fitted(features, seconds)
        costs.append((a, b, c))
        reads += read
        for vector, taken in zip(features, seconds, strict=True):
            errors.append(abs(_predicted((a, b, c, read), vector) - taken) / taken)
    return FittedCosts(tuple(costs), reads, _between(by_stage[0]), median(errors), len(errors))


def _between(passes: Sequence[RankPass]) -> float:
    """Mean seconds from the end of a pass to the beginning of one that had been ordered by then, by rank."""
    found, last = [], dict[int, RankPass]()
    for one in passes:
        before = last.get(one.rank)
        if before is not None and one.ordered < before.end:
            found.append(one.end - before.end - one.seconds)
        last[one.rank] = one
    return max(0.0, fmean(found)) if found else 0.0


def compare(
    name: str,
    timeline: RecordedTimeline,
    state: State,
    points: Sequence[tuple[str, Point]],
    retries: int,
    progress: Progress = nobody,
) -> Counterfactual:
    """What was recorded, and each point simulated; the first one is as it was. state: at the end of the recording.
    Raises ConfigError for a recording of which there is nothing to simulate."""
    config = state.config
    fitted = fit(timeline.passes, config)
    lives = [life for life in timeline.lives if not life.submit.open and not life.submit.route.moves_cached]
    if sum(isinstance(life.submit.route, FetchFrom) for life in lives) * 2 > len(lives):
        raise ConfigError(
            "the prompts of this recording were computed by other servers; diff needs a recording of one of those"
        )
    reached = [life for life in lives if _reached_queue(life)]
    counted = [life for life in reached if not life.known_before]
    if not counted:
        raise ConfigError("no request arrives in this recording: there is nothing to simulate")
    decodes = sum(life.submit.route.decodes_here for life in counted) * 2 > len(counted)
    rows = [_recorded(counted, timeline, config, fitted)]
    began = min(_queued_at(life) for life in reached)
    reached.sort(key=_queued_at)
    requests = _trace(reached, config.page_size, began)
    for label, point in points:
        rows.append(_simulated(label, point, reached, requests, fitted, decodes, retries, progress))
    left = len(lives) - len(counted)
    return Counterfactual(
        recording=name, fitted=fitted, servers=config.dp, decodes=decodes, left_out=left, rows=rows
    )  # fmt: skip


def as_recorded(state: State, longest: int) -> tuple[SchedulerConfig, int]:
    """The configuration of one server of the simulation, and the pages of its host tier. Data-parallel replicas are
    servers there, and shards of a stage are one. longest: tokens of the longest prompt and answer."""
    cache = state.replicas[0].cache
    host = 0 if cache.tiers is None else cache.tiers.slots(HOST).total
    config = msgspec.structs.replace(
        state.config,
        kv_pages=cache.total,
        max_model_len=state.config.max_model_len or longest + 2,
        vocab_size=0,
        dp=1,
        tp=1,
        lockstep=False,
        library_salts=(),
    )
    return config, host


def as_text(found: Counterfactual) -> str:
    """The table, and what it rests on."""
    fitted = found.fitted
    costs = "; ".join(f"{a:.3g} l² + {b:.3g} l + {c:.3g} s" for a, b, c in fitted.costs)
    lines = [
        f"{found.recording}: costs fitted to {fitted.passes:,} passes, which they miss by {100 * fitted.error:.0f} % "
        f"(median): {costs}, and {1000 * fitted.between_s:.2f} ms between two passes"
    ]
    if found.servers > 1:
        lines.append(f"Its {found.servers} data-parallel replicas are simulated as servers behind a router")
    if found.left_out:
        lines.append(f"{found.left_out:,} requests that began before it, or did not reach the queue, are not counted")
    header = ["", "requests", "answered", "TTFT mean", "P50", "P99", "longest", "queue", "engine s", "hits %", "failed"]
    cells = [header, *(_cells(row) for row in found.rows)]
    lines += ["Seconds; the simulation begins with an empty prefix cache.", "", table(cells, left=1)]
    recorded, model = found.rows[0].mean_s, found.rows[1].mean_s
    if recorded and model:
        lines += [
            "",
            f"As it was, the model's mean time to first token is {_percent(model / recorded)} the recorded one",
        ]
    return "\n".join(lines)


def _percent(ratio: float) -> str:
    if abs(ratio - 1) < 0.005:
        return "equal to"
    return f"{100 * abs(ratio - 1):.0f} % {'above' if ratio > 1 else 'below'}"


def _cells(row: CounterfactualRow) -> list[str]:
    times = (row.mean_s, row.p50_s, row.p99_s, row.longest_s, row.queue_s)
    failed = ", ".join(f"{count:,} {code}" for code, count in sorted(row.failed.items()))
    shown = ["-" if value is None else f"{value:.3f}" for value in times]
    return [
        row.name, f"{row.requests:,}", f"{row.first_tokens:,}", *shown, f"{row.busy_s:.2f}", f"{100 * row.hits:.1f}",
        failed or "-",
    ]  # fmt: skip


def _features(one: RankPass) -> tuple[float, float, float, float]:
    """What the seconds of a pass are linear in: squares, tokens, 1, and tokens whose KV is read by decoding."""
    squares, tokens, reads = 0, 0, 0
    for row in one.rows:
        load = Load.between(row.start, row.start + row.count)
        squares, tokens = squares + load.squares, tokens + load.tokens
        reads += row.start if row.generated else 0
    return float(squares), float(tokens), 1.0, float(reads)


def _fitted(features: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none of them negative, with the least sum of relative errors: by least squares whose weights follow
    from the errors before (iteratively reweighted), so that a pass that was held up, or that made up for one, says
    little. In the end they are scaled: all passes together take as long as they did."""
    weights, found = [1.0] * len(seconds), [0.0] * len(features[0])
    for _ in range(ROUNDS):
        found = _least_squares(features, seconds, weights)
        predicted = [max(_predicted(found, vector), SHORTEST_S) for vector in features]
        pairs = zip(predicted, seconds, strict=True)
        weights = [1 / (given * max(abs(taken - given), CLOSE * given)) for given, taken in pairs]
    scale = sum(seconds) / sum(_predicted(found, vector) for vector in features)
    return [scale * value for value in found]


def _predicted(coefficients: Sequence[float], vector: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(coefficients, vector, strict=True))


def _least_squares(
    features: Sequence[tuple[float, ...]], seconds: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Coefficients, none of them negative, with the least sum of weighted squares of errors. Each feature is scaled by
    its largest value, so that what the passes do not determine is pulled to zero alike."""
    size = len(features[0])
    units = [max(column) or 1.0 for column in zip(*features, strict=True)]
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for vector, taken, weight in zip(features, seconds, weights, strict=True):
        scaled = [value / unit for value, unit in zip(vector, units, strict=True)]
        for row, left in enumerate(scaled):
            right[row] += weight * left * taken
            for column, value in enumerate(scaled):
                matrix[row][column] += weight * left * value
    ridge = RIDGE * max(matrix[index][index] for index in range(size))
    for index in range(size):
        matrix[index][index] += ridge
    return [value / unit for value, unit in zip(solve_nonnegative(matrix, right), units, strict=True)]


def _reached_queue(life: RequestLife) -> bool:
    """It came as far as the queue, or was refused there: not those that have waited for their peer alone."""
    return not life.phases or any(span.phase is not Phase.BOOTSTRAP for span in life.phases if span.end > span.start)


def _queued_at(life: RequestLife) -> float:
    """When it could be computed first: its peer was there."""
    return life.arrived + (life.phases[0].end - life.phases[0].start if _waits_first(life) else 0.0)


def _waits_first(life: RequestLife) -> bool:
    return bool(life.phases) and life.phases[0].phase is Phase.BOOTSTRAP


def _trace(lives: Sequence[RequestLife], page_size: int, began: float) -> list[TraceRequest]:
    """The requests, in the order in which they can be computed."""
    usual = [life.tokens for life in lives if life.ended is not None and not life.failed and life.tokens]
    answer = int(median(usual)) if usual else 1
    texts = _PromptTexts(page_size)
    found = []
    for life in lives:
        submit, terms, at = life.submit, life.submit.terms, _queued_at(life)
        whole = life.ended is not None and not life.failed and life.tokens > 0
        given_up = None if life.cancelled is None else max(0.0, life.cancelled - at)
        found.append(
            TraceRequest(
                arrival_s=at - began,
                segments=texts.segments(submit.prompt, f"{terms.prefix_salt} {terms.image_digest}"),
                tokens=life.prompt_tokens,
                output_tokens=life.tokens if whole else min(max(answer, life.tokens), submit.sampling.max_tokens),
                tenant=terms.tenant,
                priority=terms.priority,
                slo_ttft_s=terms.slo_ttft_s,
                cancel_s=given_up,
            )
        )
    return found


class _PromptTexts:
    """Prompts as beginnings of numbered texts: equal first pages of two prompts are equal pages of the texts."""

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._chains: dict[tuple[int, bytes | str], int] = {}  # a prefix, and what follows -> number of the longer one
        self._introduced: dict[int, tuple[PromptSegment, ...]] = {}  # by number of a prefix of whole pages
        self._texts = 0

    def segments(self, prompt: bytes, salt: str) -> tuple[PromptSegment, ...]:
        """The segments of a packed prompt."""
        size = self._page * ITEM_BYTES
        prefix = self._chains.setdefault((0, salt), len(self._chains) + 1)
        shared: tuple[PromptSegment, ...] = ()
        done = 0
        while done + size <= len(prompt):
            longer = self._chains.get((prefix, prompt[done : done + size]))
            if longer is None:
                break
            prefix, done, shared = longer, done + size, self._introduced[longer]
        self._texts += 1
        own, first = self._texts, done
        while done + size <= len(prompt):
            prefix = self._chains.setdefault((prefix, prompt[done : done + size]), len(self._chains) + 1)
            done += size
            self._introduced[prefix] = (*shared, PromptSegment(own, (done - first) // ITEM_BYTES))
        left = (len(prompt) - first) // ITEM_BYTES
        return (*shared, PromptSegment(own, left)) if left else shared


def _recorded(
    lives: Sequence[RequestLife], timeline: RecordedTimeline, config: SchedulerConfig, fitted: FittedCosts
) -> CounterfactualRow:
    """What was."""
    layout, busy = config.layout, defaultdict[int, float](float)
    for one in timeline.passes:
        busy[one.rank] += one.seconds + (fitted.between_s if layout.place(one.rank).stage == 0 else 0.0)
    busiest = [max(busy[rank] for rank in layout.replica_ranks(index)) for index in range(config.dp)]
    answered = [life for life in lives if life.ttft_s is not None]
    return _row(
        "recorded",
        len(lives),
        [
            (life.ttft_s or 0.0, life.seconds(Phase.WAITING), life.prompt_tokens, life.cached_tokens)
            for life in answered
        ],
        sum(busiest),
        [life.outcome or "open" for life in lives if life.ttft_s is None],
    )


def _simulated(
    label: str,
    point: Point,
    lives: Sequence[RequestLife],
    requests: Sequence[TraceRequest],
    fitted: FittedCosts,
    decodes: bool,
    retries: int,
    progress: Progress,
) -> CounterfactualRow:
    scheduler, tier = point.scheduler, None
    (a, b, c), *others = fitted.costs
    costs = ((a, b, c + fitted.between_s), *others)
    if decodes:
        tier = DecodeTier(
            remote="never",
            costs=costs,
            servers=point.replicas,
            chunk_tokens=scheduler.chunk_tokens,
            read_s=fitted.read_s,
        )
    settings = ReplaySettings(
        scheduler=scheduler,
        costs=costs,
        replicas=1 if decodes else point.replicas,
        router=ROUTERS[point.router],
        host=HostTier(point.host_pages),
        retries=retries,
        decode=tier,
    )
    result = Replay(settings, requests, lambda ended: progress(f"{label}: requests", ended, len(requests))).run()
    pairs = [(life, outcome) for life, outcome in zip(lives, result.outcomes, strict=True) if not life.known_before]
    return _row(
        label,
        len(pairs),
        [
            (
                outcome.first_token_s + _queued_at(life) - life.arrived,
                outcome.queue_s,
                outcome.tokens,
                outcome.cached_tokens,
            )
            for life, outcome in pairs
            if outcome.first_token_s is not None
        ],
        sum(result.decode_busy_s if decodes else result.busy_s),
        [outcome.error for _, outcome in pairs if outcome.first_token_s is None],
    )


def _row(
    name: str, requests: int, answered: Sequence[tuple[float, float, int, int]], busy_s: float, failed: Iterable[str]
) -> CounterfactualRow:
    """answered: time to first token, seconds in the queue, prompt tokens and cached ones, of requests with a token."""
    times = sorted(ttft for ttft, _, _, _ in answered)
    tokens = sum(prompt for _, _, prompt, _ in answered)
    return CounterfactualRow(
        name=name,
        requests=requests,
        first_tokens=len(times),
        mean_s=sum(times) / len(times) if times else None,
        p50_s=quantile(times, 0.5),
        p99_s=quantile(times, 0.99),
        longest_s=times[-1] if times else None,
        queue_s=sum(queued for _, queued, _, _ in answered) / len(times) if times else None,
        busy_s=busy_s,
        hits=sum(cached for _, _, _, cached in answered) / tokens if tokens else 0.0,
        failed=dict(Counter(failed)),
    )


def points_of(given: Mapping[str, Any], combinations: Sequence[Point], first: Point) -> list[tuple[str, Point]]:
    """What is simulated, with names: first as it was, then every combination that was asked for."""
    fixed = {key: value for key, value in given.items() if key not in combinations[0].swept}
    found = [("simulated", first)]
    for point in combinations if given else ():
        flags = fixed | point.swept
        found.append((", ".join(f"{key} {_shown(value)}" for key, value in flags.items()), point))
    return found


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
