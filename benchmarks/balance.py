"""Balance of data-parallel replicas on a trace, in virtual time: prompts bound by the least load beside round robin.

`python -m benchmarks.balance TRACE` replays a trace (as headrace simulate reads them) through one scheduler of --dp
replicas of one stage each, with three bindings: that of the server, round robin, and a random number modulo the
replicas, as routers' room numbers do it. Forward passes take what --cost says; lockstep replicas take as long as the
slowest of them. idle: share of the tokens of lockstep passes that are missing since a replica had none; padded: the
same, with what shorter replicas lack to the longest.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.arguments import make_parser
from benchmarks.report import console, print_table, run
from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward, ReplicaOrder
from headrace.core.messages.replies import RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.row_costs import pass_seconds, row_seconds
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.pipeline import VOCABULARY
from headrace.testing.world import SchedulerDriver, World
from headrace.tools.simulate.replay.workload import TraceRequest, prompt
from headrace.tools.simulate.trace_file import read_trace

BINDINGS = ("least load", "round robin", "random")
COST = "3.3e-10,35.7e-6,8e-3"  # of headrace simulate's default preset
PAGE = 512  # tokens: a block of Mooncake's traces
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


class Server:
    """A scheduler, and replicas that compute in virtual time."""

    def __init__(self, config: SchedulerConfig, cost: Cost) -> None:
        self.world = World(0)
        self.first_token_s: list[float] = []
        self.cached = self.tokens = self.failed = 0
        self.idle = self.padded = self.room = 0
        """Tokens of lockstep passes: of idle replicas, all that is padded, and all together."""

        self._config = config
        self._cost = cost
        self._arrived: dict[str, float] = {}
        self._free_at = [0.0] * config.dp
        self._pass: list[tuple[int, Forward]] = []
        self._driver = SchedulerDriver(self.world, Scheduler(config), self._perform)
        for rank in config.layout.ranks:
            self._driver.handle(
                StageReady(
                    stage=rank,
                    geometry=Geometry("float32", 1, 1, 1, config.page_size),
                    fingerprint="f",
                    data_port=1,
                    kv_pages=config.kv_pages,
                    vocab_size=VOCABULARY,
                    cost=cost,
                )
            )

    def replay(self, requests: Sequence[TraceRequest], time_scale: float, binding: str) -> None:
        """Submit every request at its time, and run until all have ended."""
        for number, request in enumerate(requests):
            pins = {"round robin": number % self._config.dp, "random": _room(number) % self._config.dp}
            pin = pins.get(binding)
            self.world.at(request.arrival_s * time_scale, lambda each=(number, request, pin): self._submit(*each))  # type: ignore[misc]
        while self.world.step():
            pass

    def _submit(self, number: int, request: TraceRequest, pin: int | None) -> None:
        self._arrived[str(number)] = self.world.now
        submit = Submit(
            rid=str(number),
            prompt=prompt(request),
            sampling=ONE_TOKEN,
            route=Discard(),
            terms=RequestTerms(replica=pin),
        )
        self._driver.handle(submit)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReplicaOrder(order=Forward() as order):
                    self._forward(effect.replica, order)
                case Forward():
                    self._forward(0, effect)
                case Tokens():
                    self.first_token_s.append(self.world.now - self._arrived[effect.rid])
                case RequestFinished():
                    self.cached += effect.usage.cached_tokens
                    self.tokens += effect.usage.prompt_tokens
                case RequestFailed():
                    self.failed += 1
                case _:
                    pass

    def _forward(self, replica: int, order: Forward) -> None:
        if order.agreement is None:
            self._compute(replica, order, pass_seconds(self._cost, order.rows))
            return
        self._pass.append((replica, order))
        if len(self._pass) < self._config.dp:
            return
        longest = max(order.agreement.tokens)
        self.room += longest * self._config.dp
        self.padded += longest * self._config.dp - sum(order.agreement.tokens)
        self.idle += longest * order.agreement.tokens.count(0)
        seconds = max(pass_seconds(self._cost, each.rows) for _, each in self._pass)
        for number, each in self._pass:
            self._compute(number, each, seconds)
        self._pass.clear()

    def _compute(self, replica: int, order: Forward, seconds: float) -> None:
        at = self._free_at[replica] = max(self.world.now, self._free_at[replica]) + seconds
        samples = tuple(SampledToken(row.request, 0) for row in order.rows if row.sample is not None)
        done = PlanDone(stage=replica, seq=order.seq, duration_s=seconds, samples=samples)
        self.world.at(at, lambda: self._driver.handle(done))


def _room(number: int) -> int:
    """The number that a router draws for a request: the same in every run."""
    return (number * 0x9E3779B97F4A7C15 >> 17) & 0xFFFF


def rows(requests: Sequence[TraceRequest], config: SchedulerConfig, cost: Cost, load: float) -> list[tuple[str, ...]]:
    """A row for each binding. load: work of the whole trace, without a cache, over what the replicas can do."""
    work_s = sum(row_seconds(cost, 0, request.tokens) + cost[2] for request in requests)
    time_scale = work_s / (load * config.dp * requests[-1].arrival_s)
    found: list[tuple[str, ...]] = []
    measured: dict[str, tuple[float, float]] = {}
    for binding in BINDINGS:
        server, began = Server(config, cost), time.perf_counter()
        with console.status(f"dp {config.dp}, {binding}"):
            server.replay(requests, time_scale, binding)
        measured[binding] = mean(server.first_token_s), server.cached / max(1, server.tokens)
        found.append(
            (
                f"dp {config.dp}, {binding}",
                f"{measured[binding][0]:.2f}",
                f"{measured[binding][1]:.3f}",
                f"{server.idle / server.room:.2f}" if server.room else "",
                f"{server.padded / server.room:.2f}" if server.room else "",
                f"{server.failed}",
                f"{time.perf_counter() - began:.0f}",
            )
        )
    base = measured["round robin"]
    best = measured["least load"]
    ratios = f"{best[0] / base[0]:.2f}", f"{best[1] / max(1e-9, base[1]):.2f}"
    return [*found, (f"dp {config.dp}, least load / round robin", *ratios, "", "", "", "")]


def main(arguments: Sequence[str]) -> int:
    """Replay the trace for each number of replicas and each binding."""
    parser = make_parser("balance", __doc__)
    parser.add_argument("trace", type=Path, help="Mooncake's JSON lines, or CSV")
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 8], metavar="N", help="replicas")
    parser.add_argument("--requests", type=int, default=6000, metavar="N", help="the first of the trace")
    parser.add_argument("--load", type=float, default=1.0, help="work of the trace, uncached, over what can be done")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="tokens of a replica in a pass")
    parser.add_argument("--kv-tokens", type=int, default=3_000_000, help="tokens of the pool of a replica")
    parser.add_argument("--cost", default=COST, help="a,b,c of a·l² + b·l + c seconds")
    parser.add_argument("--policy", default="srpt", choices=("srpt", "fcfs"))
    parser.add_argument("--free-running", action="store_true", help="replicas that share nothing")
    given = parser.parse_args(arguments)
    try:
        a, b, c = map(float, given.cost.split(","))
    except ValueError:
        raise ConfigError(f"--cost {given.cost}: write three numbers, such as {COST}") from None
    requests = read_trace(given.trace, given.requests)
    table: list[tuple[str, ...]] = []
    for dp in given.dp:
        config = SchedulerConfig(
            page_size=PAGE,
            kv_pages=given.kv_tokens // PAGE,
            vocab_size=VOCABULARY,
            chunk_tokens=given.chunk_tokens,
            dp=dp,
            lockstep=not given.free_running,
            policy=given.policy,
            eviction="lru",
            max_queued_tokens=1 << 40,
            max_queued_requests=1 << 30,
            stage_timeout_s=1e6,
        )
        table += rows(requests, config, (a, b, c), given.load)
    columns = ("", "TTFT (s)", "cached", "idle", "padded", "failed", "took (s)")
    print_table(f"{len(requests):,} requests at load {given.load:g}", columns, table)
    return 0


if __name__ == "__main__":
    run(main)
