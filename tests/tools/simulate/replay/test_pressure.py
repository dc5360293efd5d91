"""A prefill server under pressure, on modelled stages in virtual time, where every bound is exact.

Peers that never come, long prompts that are cancelled, deep pipelines, slow links, and the times that are reported.
"""

from collections.abc import Callable

import pytest

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import Forward, Order, SendChunk
from headrace.core.messages.peers import PeerJoined, PeerReserved
from headrace.core.messages.replies import Held, RequestFailed, RequestFinished, Tokens
from headrace.core.stats import HistogramSample
from headrace.core.types.errors import NO_PEER, ErrorInfo
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.request import SamplingParams, SendTo, Timing
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.row_costs import row_seconds
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.pipeline import TimedHostTier, TimedPipeline
from headrace.testing.world import SchedulerDriver, World
from headrace.tools.simulate.replay.costs import split_evenly

COST: Cost = (1e-8, 1e-4, 0.002)  # of all stages: 0.1 ms a token, 2 ms a pass, attention
PAGE, CHUNK, PEER = 16, 512, "peer"


class Server:
    """A real Scheduler on modelled stages, and one decode peer."""

    def __init__(self, stages: int = 1, link_tokens_s: float | None = None, **changes: object) -> None:
        self.world = World(0)
        defaults: dict[str, object] = {"kv_pages": 16384, "chunk_tokens": CHUNK, "max_model_len": 1 << 20}
        settings = defaults | {"page_size": PAGE, "stages": stages, "pipeline_depth": 0} | changes
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        self.scheduler = Scheduler(config)
        self._driver = SchedulerDriver(self.world, self.scheduler, self._perform)
        costs = split_evenly(COST, stages)
        tier = TimedHostTier(self.world, stages, PAGE, None, self._driver.handle)
        self.pipeline = TimedPipeline(self.world, costs, link_tokens_s, tier, self._driver.handle)
        self.pipeline.start(config.kv_pages, PAGE, 0)
        pools = (Geometry("float32", 1, 1, 1, PAGE),)
        self._driver.handle(
            PeerJoined(name=PEER, terms=PeerTerms(session=PEER, geometries=pools, window_bytes=1 << 40))
        )
        self.arrived: dict[str, float] = {}
        self.first: dict[str, float] = {}
        """Seconds from the arrival to the first token, by request id."""
        self.ended: dict[str, float] = {}
        self.timings: dict[str, Timing] = {}
        self.errors: dict[str, ErrorInfo] = {}
        self.sent: list[tuple[float, SendChunk]] = []
        self.passes: list[tuple[float, Forward]] = []

    def prompt(self, rid: str, tokens: int, *, reserve_after: float | None = 0.0, hold: bool = False) -> None:
        """Submit a prompt now. reserve_after: seconds until the peer reserves; None: it never does."""
        self.arrived[rid] = self.world.now
        text = pack((len(rid) * 31 + ord(rid[-1]) * 7 + at * at) % 997 for at in range(tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        self._driver.handle(Submit(rid=rid, prompt=text, sampling=sampling, route=SendTo(rid, hold)))
        if reserve_after is not None:
            self.later(reserve_after, lambda: self._reserve(rid, tokens))

    def cancel(self, rid: str) -> None:
        self._driver.handle(Abort(rid=rid))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.world.at(self.world.now + seconds, action)

    def run(self) -> "Server":
        assert self.world.run(1_000_000)
        assert self.scheduler.check_integrity() == []
        return self

    def pages(self) -> int:
        """Pages that requests hold."""
        stats = self.scheduler.statistics(self.world.now)
        samples = {(sample.name, *sample.labels): sample.value for sample in stats.samples}
        return int(samples["kv_pages", "leased"])

    def phases(self) -> dict[str, HistogramSample]:
        found = self.scheduler.statistics(self.world.now).histograms
        return {sample.labels[0]: sample for sample in found if sample.name == "phase_duration_seconds"}

    def _reserve(self, rid: str, tokens: int) -> None:
        pages = pack(range(ceil_div(tokens, PAGE)))
        self._driver.handle(
            PeerReserved(
                session=PEER,
                reservation=Reservation(
                    ticket=rid, generation=1, prompt_tokens=tokens, cached_tokens=0, pages=pages, row=0
                ),
            )
        )

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Order():
                    if isinstance(effect, SendChunk):
                        self.sent.append((self.world.now, effect))
                    if isinstance(effect, Forward):
                        self.passes.append((self.world.now, effect))
                    self.pipeline.order(effect)
                case Tokens():
                    self.first.setdefault(effect.rid, self.world.now - self.arrived[effect.rid])
                case RequestFinished():
                    self.ended[effect.rid] = self.world.now - self.arrived[effect.rid]
                    self.timings[effect.rid] = effect.timing
                case RequestFailed():
                    self.errors[effect.rid] = effect.error
                case Held():
                    self.timings[effect.rid] = effect.timing
                case _:
                    pass


def alone(tokens: int, stages: int = 1) -> float:
    """Time to the first token of a prompt that is alone."""
    server = Server(stages)
    server.prompt("alone", tokens)
    return server.run().first["alone"]


@pytest.mark.parametrize("hold", [False, True])
def test_a_thousand_prompts_whose_peer_never_comes_cost_others_nothing(hold: bool) -> None:
    """Without hold they wait for a reservation and take nothing; with it they are computed, hold a bounded share of the
    pages, and lose them when the lease ends. The honest prompts in between are as fast as alone, or wait for what is
    computed before them."""
    server = Server(
        bootstrap_timeout_s=5.0, hold_lease_s=5.0, hold_percent=25, kv_pages=4096, max_queued_tokens=1 << 20
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        peak = max(peak, server.pages())

    for number in range(1000):
        server.later(number * 0.01, lambda rid=f"lost {number}": server.prompt(rid, 640, reserve_after=None, hold=hold))
    for number in range(20):
        server.later(0.3 + number * 0.5, lambda rid=f"honest {number}": server.prompt(rid, 64))
        server.later(0.35 + number * 0.5, watch)
    server.run()
    honest = [seconds for rid, seconds in server.first.items() if rid.startswith("honest")]
    assert len(honest) == 20
    assert not [rid for rid in server.errors if rid.startswith("honest")]
    one_pass = COST[2] + row_seconds(COST, 0, 640)
    assert max(honest) <= alone(64) + (2 * one_pass if hold else 1e-9)
    lost = {error.code for error in server.errors.values()}
    assert lost == ({"lease_expired", "queue_full"} if hold else {NO_PEER})
    assert peak <= (4096 // 4 if hold else 0) + 2 * ceil_div(640, PAGE)
    assert server.pages() == 0


@pytest.mark.parametrize("stages", [1, 4])
def test_a_short_prompt_after_cancelled_long_ones_waits_for_one_chunk_at_most(stages: int) -> None:
    server = Server(stages, policy="fcfs")
    for number in range(10):
        server.prompt(f"long {number}", 20_000)

    def cancel_all() -> None:
        for number in range(10):
            server.cancel(f"long {number}")
        server.prompt("short", 64)

    server.later(0.7, cancel_all)
    server.run()
    chunk_s = max(COST[2] + row_seconds(COST, start, CHUNK) for start in (0, 20_000 - CHUNK))
    assert server.first["short"] <= alone(64, stages) + chunk_s
    assert server.first["short"] > alone(64, stages)  # they were being computed
    assert server.pages() == 0


def test_a_deep_pipeline_answers_a_lone_prompt_as_fast_as_one_stage() -> None:
    """Admission, the first token and the release of pages ride no ring of micro-batches: with its cost shared out over
    eight stages, everything takes as long as on one."""
    results = {}
    for stages in (1, 8):
        server = Server(stages, link_tokens_s=1e6)
        server.prompt("lone", 256)
        server.run()
        results[stages] = (server.first["lone"], server.ended["lone"])
        assert server.pages() == 0
    assert results[8] == pytest.approx(results[1], rel=1e-6)


def test_pages_of_a_cancelled_prompt_are_back_when_the_passes_under_way_are_through() -> None:
    server = Server(8, pipeline_depth=8, kv_pages=1024)
    chunk_s = COST[2] + row_seconds(COST, 10_000, CHUNK)
    in_use: list[int] = []
    server.prompt("long", 10_000)
    server.later(0.2, lambda: in_use.append(server.pages()))
    server.later(0.2, lambda: server.cancel("long"))
    server.later(0.2 + 2 * chunk_s, lambda: in_use.append(server.pages()))
    server.run()
    assert in_use[0] > 0
    assert in_use[1:] == [0]


def test_kv_leaves_while_later_chunks_are_computed() -> None:
    """After the last token is computed the link has one chunk left, not the prompt."""
    tokens, link = 16 * CHUNK, 12_000.0  # a little faster than the stages compute
    server = Server(link_tokens_s=link)
    server.prompt("p", tokens)
    server.run()
    assert len(server.sent) >= 16
    assert server.sent[0][0] < server.first["p"] / 8
    assert server.ended["p"] - server.first["p"] <= 1.01 * CHUNK / link


def test_reported_times_are_the_true_ones_and_add_up() -> None:
    """Over a link of known speed, with a peer that reserves late, and behind another prompt."""
    link, tokens = 5_000.0, 4 * CHUNK
    server = Server(link_tokens_s=link, policy="fcfs")
    server.prompt("before", tokens)
    server.later(0.01, lambda: server.prompt("p", tokens, reserve_after=0.1))
    server.run()
    for rid, timing in server.timings.items():
        assert timing.total_s == pytest.approx(server.ended[rid], abs=1e-6)
        assert timing.bootstrap_s + timing.queue_s + timing.forward_s == pytest.approx(server.first[rid], abs=1e-6)
    timing = server.timings["p"]
    assert timing.bootstrap_s == pytest.approx(0.1, abs=1e-6)
    assert timing.queue_s > 0.01
    # the link is the slower one: it carries both prompts, one after the other, from the first chunk of the first on
    first_chunk_s = COST[2] + row_seconds(COST, 0, CHUNK)
    at_the_end = first_chunk_s + 2 * tokens / link
    assert server.arrived["p"] + timing.total_s == pytest.approx(at_the_end, rel=0.05)
    sums = {phase: sample.sum for phase, sample in server.phases().items()}
    assert sum(sums.values()) == pytest.approx(sum(server.ended.values()), rel=1e-6)
    assert sums["inflight"] == pytest.approx(sum(timing.transfer_s for timing in server.timings.values()), rel=1e-6)
