"""How close `headrace simulate` comes to a server: the same arrivals in real time and in virtual time.

`python -m benchmarks.simulate_accuracy` takes the stub model, `--model smollm2` a real one. The costs of forward passes
are measured first, as `--calibrate` does, then prompts of many lengths arrive, some of which continue earlier ones. On
a machine whose speed changes meanwhile the last column shows it: the replay simulated with the costs of its own passes.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import httpx
import msgspec

from benchmarks.arguments import add_dtype, add_threads, make_parser
from benchmarks.report import console, print_table, run
from benchmarks.server import prefill_body, serving
from headrace.core.config import SchedulerConfig
from headrace.core.config.scheduler import Policy
from headrace.core.types.packed import unpack
from headrace.engine.model.stub import is_stub
from headrace.integrations.http_client import direct_async_client
from headrace.server.launch.local_server import LocalServer
from headrace.tools.simulate.calibrate import Calibration, calibrate, evaluate, stage_passes
from headrace.tools.simulate.objectives import OBJECTIVES
from headrace.tools.simulate.replay.costs import offered_work
from headrace.tools.simulate.replay.replay import Replay, ReplayOutcome, ReplayResult, ReplaySettings
from headrace.tools.simulate.replay.routing import ScoreRouter
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest, prompt
from headrace.tools.simulate.summary import ReplaySummary, summarise
from headrace.tools.simulate.trace_file import read_trace

STUB = "stub:layers=4,us_per_token=300,ps_per_token_squared=60000,us_per_plan=10000,max_len=8192"
VOCABULARY = 1000
FIRST_TEXT = 10  # number of a session's text
CONTINUED = 0.4  # share of requests that continue a session
CONNECT_S = 600.0
LONGEST_RECORDING_S = 60
SETTLE_S = 0.5  # until the server records
WARM_UP = (4, 8, 600)  # tokens, all 1, with which no prompt of the workload begins


def workload(count: int, longest: int, seed: int) -> list[TraceRequest]:
    """Requests one mean gap apart, with lengths from a log-normal distribution; sessions grow turn by turn."""
    draw = random.Random(seed)
    sessions: list[int] = []
    requests, at = [], 0.0
    for number in range(count):
        tokens = max(16, min(longest, int(draw.lognormvariate(0, 1.0) * longest / 8)))
        session = FIRST_TEXT + number
        if sessions and draw.random() < CONTINUED:
            session = draw.choice(sessions[-20:])
        sessions.append(session)
        requests.append(TraceRequest(at, (PromptSegment(session, tokens),), tokens))
        at += draw.expovariate(1.0)
    return requests


async def _replay(server: LocalServer, requests: Sequence[TraceRequest]) -> tuple[ReplayResult, Calibration]:
    """Send every request at its time; the first token is there when the answer is. Returns what came of them, and the
    costs of the passes of the first minute."""
    bodies = [prefill_body(unpack(prompt(request, VOCABULARY))) for request in requests]
    outcomes = [ReplayOutcome(request.tokens, request.arrival_s) for request in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with direct_async_client(base_url=server.url, timeout=CONNECT_S, limits=limits) as client:
        for tokens in WARM_UP:  # the first requests of a server and of a client are slower
            await client.post("/v1/prefill", json=prefill_body([1] * tokens))
        recording = asyncio.create_task(client.get(f"/debug/trace?seconds={LONGEST_RECORDING_S}"))
        await asyncio.sleep(SETTLE_S)
        began = time.perf_counter()

        async def send(number: int) -> None:
            await asyncio.sleep(began + requests[number].arrival_s - time.perf_counter())
            outcomes[number].arrival_s = time.perf_counter() - began
            response = await client.post("/v1/prefill", json=bodies[number] | {"rid": str(number)})
            assert response.status_code == 200, response.text
            outcomes[number].first_token_s = time.perf_counter() - began - outcomes[number].arrival_s
            outcomes[number].cached_tokens = response.json()["usage"]["cached_tokens"]

        await asyncio.gather(*(send(number) for number in range(len(requests))))
        passes = stage_passes((await recording).json())
    seconds = {str(number): outcome.first_token_s or 0.0 for number, outcome in enumerate(outcomes)}
    own = evaluate(server.url, passes, seconds, 0)
    ends = [outcome.arrival_s + (outcome.first_token_s or 0.0) for outcome in outcomes]
    return ReplayResult(tuple(outcomes), (0.0,), max(ends) - outcomes[0].arrival_s, 0), own


def simulated(requests: Sequence[TraceRequest], engine: Calibration, config: SchedulerConfig) -> ReplayResult:
    """The same requests in virtual time."""
    settings = ReplaySettings(scheduler=config, costs=engine.costs, router=ScoreRouter, latency_s=engine.latency_s)
    return Replay(settings, requests).run()


def at_load(
    requests: Sequence[TraceRequest], engine: Calibration, config: SchedulerConfig, load: float
) -> list[TraceRequest]:
    """The requests, with arrival times scaled to this load."""
    work = offered_work(
        requests,
        engine.costs,
        pages=config.kv_pages,
        page_size=config.page_size,
        chunk_tokens=config.chunk_tokens,
    )
    scale = work.seconds / (load * requests[-1].arrival_s)
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s * scale) for request in requests]


def figures(summary: ReplaySummary) -> dict[str, float]:
    """What is compared."""
    latency = summary.ttft["all"]
    return {
        "time to first token, P50, ms": 1000 * (latency.p50_s or 0.0),
        "time to first token, P99, ms": 1000 * (latency.p99_s or 0.0),
        "time to first token, mean, ms": 1000 * (summary.mean_s or 0.0),
        "tokens/s": summary.tokens_per_s,
        "cache hits, % of tokens": 100 * summary.hits,
    }


def _print(
    load: float,
    requests: Sequence[TraceRequest],
    real: ReplayResult,
    config: SchedulerConfig,
    engines: Sequence[Calibration],
) -> None:
    """Print the figures of the server, and beside them those simulated with each of the costs. Arrivals are taken as
    they were, so that what a late client costs is in all of them."""
    sent = [
        msgspec.structs.replace(request, arrival_s=outcome.arrival_s)
        for request, outcome in zip(requests, real.outcomes, strict=True)
    ]
    objective, unused = OBJECTIVES["flat"], (0.0, 0.0, 0.0)
    measured = figures(summarise(real, objective, unused))
    modelled = [figures(summarise(simulated(sent, engine, config), objective, unused)) for engine in engines]
    rows = []
    for name, value in measured.items():
        cells = [f"{each[name]:,.1f} ({100 * (each[name] / value - 1):+.1f} %)" for each in modelled]
        rows.append((name, f"{value:,.1f}", *cells))
    print_table(f"load {load:g}", ("", "server", "simulated", "own passes"), rows)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError, ServerFailed."""
    parser = make_parser("simulate_accuracy", __doc__)
    parser.add_argument("--model", default=STUB, help="stub:..., or as in headrace serve")
    add_dtype(parser)
    add_threads(parser)
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="requests of a replay")
    parser.add_argument("--longest", type=int, default=4000, metavar="TOKENS", help="tokens of the longest prompt")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8], metavar="X", help="loads to replay at")
    parser.add_argument("--depth", type=int, default=1, metavar="N", help="--pipeline-depth of the server")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages of the server")
    parser.add_argument("--policy", default="fcfs", choices=get_args(Policy), help="--policy of the server")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests, as headrace simulate takes them")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="--page-size of the server")
    parser.add_argument("--chunk-tokens", type=int, default=512, metavar="N", help="--chunk-tokens of the server")
    parser.add_argument("--kv-pages", type=int, default=1024, metavar="N", help="--kv-pages of the server")
    given = parser.parse_args(arguments)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--kv-pages", str(given.kv_pages),
             "--page-size", str(given.page_size), "--chunk-tokens", str(given.chunk_tokens),
             "--max-queued-tokens", "100000000", "--pipeline-depth", str(given.depth), "--pp", str(given.pp),
             "--policy", given.policy, "--threads", "1" if is_stub(given.model) else str(given.threads))  # fmt: skip
    config = SchedulerConfig(
        page_size=given.page_size,
        kv_pages=given.kv_pages,
        chunk_tokens=given.chunk_tokens,
        policy=given.policy,
        pipeline_depth=given.depth,
        stages=given.pp,
        max_queued_tokens=100_000_000,
    )
    if given.trace is None:
        offered = workload(given.requests, given.longest, 1)
    else:
        offered = read_trace(given.trace, given.requests)
    for load in given.loads:
        with serving(*flags) as server, console.status("calibrating"):
            engine = calibrate(server.url, {})
        console.print(engine.text, engine.costs, f"latency {1000 * engine.latency_s:.1f} ms")
        requests = at_load(offered, engine, config, load)
        about = f"{len(requests)} requests in {requests[-1].arrival_s:.0f} s"
        with serving(*flags) as server, console.status(about):  # another one, with an empty cache
            real, own = asyncio.run(_replay(server, requests))
        console.print(f"its own passes: {own.text}", own.costs)
        _print(load, requests, real, config, (engine, msgspec.structs.replace(own, latency_s=engine.latency_s)))
    return 0


if __name__ == "__main__":
    run(main)
