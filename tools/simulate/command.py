"""`headrace simulate`: reads the trace, replays every point of the sweep, prints the table."""

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.core.config.scheduler import PROMISES
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.forked import run_forked
from headrace.core.runtime.output import say
from headrace.core.types.errors import ConfigError
from headrace.scheduler.costs.chunking import Cost
from headrace.tools.output import ProgressLine, check_output, check_plotting, write_json
from headrace.tools.simulate import options, plot
from headrace.tools.simulate.objectives import OBJECTIVES
from headrace.tools.simulate.options import Point
from headrace.tools.simulate.replay.costs import offered_work, split_evenly
from headrace.tools.simulate.replay.decode_server import DecodeTier
from headrace.tools.simulate.replay.replay import Replay, ReplaySettings
from headrace.tools.simulate.replay.replica import HostTier
from headrace.tools.simulate.replay.routing import ROUTERS
from headrace.tools.simulate.replay.workload import TraceRequest
from headrace.tools.simulate.report import ReplayReport, Row, as_text
from headrace.tools.simulate.summary import summarise
from headrace.tools.simulate.trace_file import read_trace

FORECAST_LIMIT_S = 60.0  # for one copy of a scheduler
PROGRESS_S = 0.2  # between two updates of the line


class _Engine(msgspec.Struct, frozen=True):
    """What forward passes take, and how it is known."""

    costs: tuple[Cost, ...]
    """One for all stages together, or one for each."""
    kv_tokens: int
    """Size of the KV pool; 0 where it is not known."""
    read_rate: float | None
    """Tokens a second whose KV requests that decode read; None: all at once."""
    latency_s: float
    origin: str
    """Where the costs are from, for the report."""

    @property
    def total(self) -> Cost:
        """The cost of all stages together."""
        a, b, c = (sum(values) for values in zip(*self.costs, strict=True))
        return a, b, c

    def stages(self, count: int) -> tuple[Cost, ...]:
        """The cost of each of so many stages."""
        return self.costs if len(self.costs) == count else split_evenly(self.total, count)


class _Around(msgspec.Struct, frozen=True):
    """What clients and decode peers do, and host memory."""

    fetch_rate: float | None
    """Tokens a second whose KV is fetched from each server; None: at once."""
    host_rate: float | None
    """Tokens a second whose KV is copied to and from each host tier; None: at once."""
    retries: int
    send_objective: bool
    decode: DecodeTier
    """Of replays with decode servers."""
    tpot_s: float
    """Seconds per token after the first one that count as good."""
    slow: float
    """As in ReplaySettings."""


def main(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the command. Returns 0; raises ConfigError for a wrong flag, trace or file."""
    values = vars(given)
    objective = options.parse_choice("--objective", given.objective, OBJECTIVES)
    fetch_rate = options.parse_rate("--fetch-rate", given.fetch_rate)
    host_rate = options.parse_rate("--host-rate", given.host_rate)
    limit = options.parse_whole("--limit", given.limit)
    retries = options.parse_whole("--retries", given.retries) or 0
    json_file = check_output("--json", given.json)
    plot_file = check_output("--plot", given.plot, ".png")
    check_plotting(plot_file)
    requests = read_trace(Path(given.trace), limit)
    longest = max(request.tokens + request.output_tokens for request in requests)
    asked = options.points(values, environ, longest)
    engine = _engine(given, environ)
    decode = _decode_tier(given, engine, asked[0].scheduler.stages)
    tpot_s = options.parse_rate("--tpot-objective", given.tpot_objective) or options.TPOT_OBJECTIVE_S
    slow = options.parse_rate("--slow-server", given.slow_server) or 1.0
    asked = [_with_pool(point, engine) for point in asked]
    gc.collect()
    gc.freeze()  # hundreds of thousands of segments, which no later collection need look at
    progress = ProgressLine(sys.stderr, SystemClock(), PROGRESS_S)
    rows = []
    work_s = _work(requests, asked[0], engine)
    around = _Around(fetch_rate, host_rate, retries, given.send_objective, decode, tpot_s, slow)
    for number, point in enumerate(asked, 1):

        def update(ended: int, of: str = f"replay {number} of {len(asked)}") -> None:
            progress.show(f"{of}: {ended:,} requests, {100 * ended // len(requests)} %", at_once=not ended)

        update(0)
        rows.append(_replay(point, requests, engine, work_s, around, objective, update))
    progress.close()
    report = ReplayReport(
        trace=Path(given.trace).name,
        requests=len(requests),
        tokens=sum(request.tokens for request in requests),
        trace_s=requests[-1].arrival_s,
        engine=engine.origin,
        costs=engine.costs,
        latency_s=engine.latency_s,
        objective=objective,
        objective_sent=given.send_objective,
        retries=retries,
        rows=rows,
    )
    say(as_text(report))
    write_json(json_file, report)
    if plot_file is not None:
        plot.draw(report, plot_file)
    return 0


def _copied(function: Callable[[], bytes]) -> bytes:
    """Call a function in a copy of this process."""
    return run_forked(function, FORECAST_LIMIT_S)


def _engine(given: argparse.Namespace, environ: Mapping[str, str]) -> _Engine:
    if given.cost is not None:
        return _Engine((options.parse_cost("--cost", given.cost),), 0, None, 0.0, f"cost {given.cost}")
    if given.calibrate is not None:
        from headrace.tools.simulate.calibrate import calibrate  # torch takes seconds to load

        found = calibrate(given.calibrate, environ)
        return _Engine(found.costs, found.kv_tokens, None, found.latency_s, found.text)
    name = options.parse_choice("--preset", given.preset or options.DEFAULT_PRESET, options.PRESETS)
    preset = options.PRESETS[name]
    return _Engine((preset.cost,), preset.kv_tokens, preset.read_rate, 0.0, f"preset {name}")


def _decode_tier(given: argparse.Namespace, engine: _Engine, stages: int) -> DecodeTier:
    """The decode servers of replays that have any. Raises ConfigError for flags that need --remote."""
    if given.remote is None:
        for option in options.OF_DECODE_SERVERS:
            if getattr(given, option.replace("-", "_")) is not None:
                raise ConfigError(f"--{option} is of decode servers; add --remote always, never or cost")
    read_rate = options.parse_rate("--read-rate", given.read_rate) or engine.read_rate
    handoff_s = options.parse_rate("--handoff-s", given.handoff_s)
    cost = None if given.decode_cost is None else options.parse_cost("--decode-cost", given.decode_cost)
    return DecodeTier(
        remote="always",
        costs=engine.stages(stages) if cost is None else split_evenly(cost, stages),
        servers=options.parse_whole("--decode-servers", given.decode_servers) or 1,
        chunk_tokens=options.parse_whole("--decode-chunk-tokens", given.decode_chunk_tokens)
        or options.DECODE_CHUNK_TOKENS,
        read_s=0.0 if read_rate is None else 1 / read_rate,
        handoff_s=options.HANDOFF_S if handoff_s is None else handoff_s,
    )


def _with_pool(point: Point, engine: _Engine) -> Point:
    """The point with the engine's pool, if it has none of its own."""
    scheduler = point.scheduler
    if scheduler.kv_pages:
        return point
    if not engine.kv_tokens:
        raise ConfigError("--kv-pages is needed beside --cost: the pages of each server's KV pool")
    pages = max(1, engine.kv_tokens // scheduler.page_size)
    return msgspec.structs.replace(point, scheduler=msgspec.structs.replace(scheduler, kv_pages=pages))


def _work(requests: Sequence[TraceRequest], point: Point, engine: _Engine) -> float:
    """Engine seconds of the trace; loads of all points refer to those of the first, so that arrivals are equal."""
    scheduler = point.scheduler
    return offered_work(
        requests,
        engine.stages(scheduler.stages),
        pages=scheduler.kv_pages,
        page_size=scheduler.page_size,
        chunk_tokens=scheduler.chunk_tokens,
        prefix_cache=scheduler.prefix_cache,
    ).seconds


def _replay(
    point: Point,
    requests: Sequence[TraceRequest],
    engine: _Engine,
    work_s: float,
    around: _Around,
    objective: str,
    progress: Callable[[int], None],
) -> Row:
    duration_s = requests[-1].arrival_s
    if point.load is not None and not (duration_s and work_s):
        raise ConfigError("--load needs requests at different times, which take some time: there is nothing to scale")
    scale = 1.0 if point.load is None else work_s / (point.load * duration_s)
    costs = engine.stages(point.scheduler.stages)
    settings = ReplaySettings(
        scheduler=point.scheduler,
        costs=costs,
        replicas=point.replicas,
        siblings=point.siblings,
        hints=point.hints,
        returns=point.returns,
        open=point.open,
        cancels=point.cancels,
        router=ROUTERS[point.router],
        time_scale=scale,
        fetch_tokens_s=around.fetch_rate,
        host=HostTier(point.host_pages, around.host_rate),
        retries=around.retries,
        objective_s=(lambda tokens: OBJECTIVES[objective](tokens, engine.total)) if around.send_objective else None,
        latency_s=engine.latency_s,
        hedge=point.hedge,
        slow=around.slow,
        copied=_copied if point.scheduler.promise != "off" else None,
        decode=None if point.remote is None else msgspec.structs.replace(around.decode, remote=point.remote),
    )
    result = Replay(settings, requests, progress).run()
    load = work_s / (duration_s * scale) if duration_s else None
    return Row(
        load=load,
        swept=point.swept,
        replicas=point.replicas,
        policy=point.scheduler.policy,
        promise=PROMISES[point.scheduler.promise],
        chunk_tokens=point.scheduler.chunk_tokens,
        kv_pages=point.scheduler.kv_pages,
        host_pages=point.host_pages,
        page_size=point.scheduler.page_size,
        plans=result.plans,
        summary=summarise(result, OBJECTIVES[objective], engine.total, None if point.remote is None else around.tpot_s),
    )
