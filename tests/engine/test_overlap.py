"""Dual-batch overlap on a whole model: a pass in two halves that take turns computes what it computes in one."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import pytest
import torch

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.ranks.coordinate import Agreement, Rules, coordinate, vote
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.exchange import AllGather, AllToAll, Exchange, Mixture
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.expert_plan import TILE_TOKENS, Way
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.runner import ModelRunner
from headrace.engine.stub.experts import StubTime
from headrace.engine.stub.runner import StubRunner
from tests.engine.collectives.threads import Meeting, ThreadCollectives
from tests.engine.layers.mixtures import DEADLINE_S, KERNELS, Groups, run_stage
from tests.engine.models import Prompt, Saved, make_runner, pool_tokens, random_tokens, reported_logprobs

PAGE = 16
TILE = 8  # tokens
WAYS: list[Way] = ["allgather", "alltoall"]
PAGES = [list(range(5)), list(range(5, 10)), list(range(10, 15))]


STUB = "stub:layers=4,hidden=16,max_len=100,vocab=300,experts=6,top_k=2,us_per_token=100"

STUB_MOE = MoeSpec(experts=6, top_k=2, intermediate_size=1, layer_kinds=())


class Computed(NamedTuple):
    """What a rank computed for the prompts of its replica."""

    logprobs: list[torch.Tensor]
    kv: list[torch.Tensor]
    cuts: list[int]
    operations: list[str]
    """Collective operations of both halves on this rank, in the order in which they were begun."""


def prompts_of(replica: int) -> list[Prompt]:
    lengths = ((61, 20, 9), (50, 37, 2))[replica]
    seeds = [10 * replica + index for index in range(3)]
    return [
        Prompt(seed, random_tokens(length, seed), pages, PAGE)
        for seed, length, pages in zip(seeds, lengths, PAGES, strict=True)
    ]


def passes_of(replica: int) -> list[list[PlanRow]]:
    """Cut inside a row, at the edge of rows and of a page, after a prefix in the pool, among decoding rows, and not at
    all, where one replica has too few tokens."""
    one, two, three = prompts_of(replica)
    if replica == 0:
        return [
            [one.row(0, 30)],
            [one.row(30, 16), two.row(0, 15), three.row(0, 1)],
            [three.row(1, 7), one.row(46, 13)],
            [two.row(15, 4)],
            [one.row(59, 1), two.row(19, 1), three.row(8, 1)],
            [one.row(60, 1)],
        ]
    return [
        [one.row(0, 25), two.row(0, 7)],
        [one.row(25, 24), two.row(7, 9)],
        [two.row(16, 19), three.row(0, 1)],
        [two.row(35, 1)],
        [one.row(49, 1), two.row(36, 1), three.row(1, 1)],
        [],
    ]


def agreements(tp: int, way: Way, *, cut: bool) -> list[Agreement]:
    """Of all passes."""
    rules = Rules(multiple=tp, pad="max" if way == "allgather" else "none", cut=cut, cut_prefill=4, cut_decode=2)
    made = []
    for rows in zip(passes_of(0), passes_of(1), strict=True):
        agreed = coordinate([vote([row.count for row in each], rules) for each in rows], rules)
        assert agreed is not None
        made.append(agreed)
    return made


def compute(runner: ModelRunner, replica: int, agreed: Sequence[Agreement]) -> tuple[list[torch.Tensor], ...]:
    """Log-probabilities after all prompts, and their KV."""
    logprobs = []
    for rows, each in zip(passes_of(replica), agreed, strict=True):
        hidden = runner.forward(rows, None, each)
        if rows:
            logprobs += [reported_logprobs(sample) for sample in runner.sample(rows, hidden).result().samples]
    return logprobs, [pool_tokens(runner, prompt.pages, len(prompt.tokens)) for prompt in prompts_of(replica)]


def exchange_of(way: Way, moe: MoeSpec, groups: Groups, tile: int = TILE) -> Exchange:
    """In tiles of so many tokens, of which halves may need unequal numbers."""
    tp, dp, ep = groups
    return AllGather(moe.experts, tp, dp, tile) if way == "allgather" else AllToAll(moe, tp, ep, tile)


def by_ranks(saved: Saved, tp: int, way: Way, *, cut: bool) -> list[Computed]:
    """What each of two replicas of tp shards computed."""
    moe = load_spec(resolve_source(str(saved.folder))).moe
    assert moe is not None
    agreed = agreements(tp, way, cut=cut)
    across = [Meeting(2, DEADLINE_S) for _ in range(tp)]
    stage = Meeting(2 * tp, DEADLINE_S)

    def work(replica: int, shard: int, groups: Groups) -> Computed:
        log: list[str] = []
        second = (groups[0], ThreadCollectives(across[shard], replica), ThreadCollectives(stage, groups[2].rank))
        for name, group in zip(("tp", "dp", "ep", "dp2", "ep2"), (*groups, *second[1:]), strict=True):
            assert isinstance(group, ThreadCollectives)
            group.name, group.log = name, log
        exchanges = [exchange_of(way, moe, each) for each in ((groups, second) if cut else (groups,))]
        runner = make_runner(saved.folder, tp=groups[0], exchanges=exchanges)
        log.clear()  # of the start
        return Computed(*compute(runner, replica, agreed), [each.cut for each in agreed], log)

    return run_stage(2, tp, work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("deepseek-v3", marks=pytest.mark.full)])
def test_halves_compute_what_a_whole_pass_does(saved: Callable[[str], Saved], name: str, tp: int, way: Way) -> None:
    """To the bit, with native kernels: reproducible whatever the halves (G8)."""
    model = saved(name)
    whole, halved = by_ranks(model, tp, way, cut=False), by_ranks(model, tp, way, cut=True)
    assert halved[0].cuts == [16, 15 + tp, 10, 0, tp, 0]
    assert not any(whole[0].cuts)
    for found, expected in zip(halved, whole, strict=True):
        for one, other in zip((*found.logprobs, *found.kv), (*expected.logprobs, *expected.kv), strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
            assert KERNELS is None or torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 2])
def test_all_ranks_begin_the_same_operations_in_the_same_order(
    saved: Callable[[str], Saved], tp: int, way: Way
) -> None:
    """Also over the groups of both halves, which take turns: one waits while the other computes."""
    ranks = by_ranks(saved("qwen3-moe"), tp, way, cut=True)
    exchanged = [[each for each in found.operations if not each.startswith("tp")] for found in ranks]
    assert all(each == exchanged[0] for each in exchanged)
    shards = [found.operations for found in ranks]
    assert all(shards[rank] == shards[rank - rank % tp] for rank in range(2 * tp))
    group = "dp" if way == "allgather" else "ep"
    in_turn = [name for name, _ in groupby(each.split()[0] for each in exchanged[0])]
    tiles = 2 if way == "allgather" or tp == 1 else 1  # of the 16 tokens of a half, or of a shard's share of them
    turns = 2 * 2 * tiles  # there and back in two layers of experts
    assert in_turn[: 2 * turns] == [group, f"{group}2"] * turns


class StubPass(NamedTuple):
    """What a rank of the stub model computed."""

    tokens: list[int]
    kv: list[torch.Tensor]
    seconds: list[float]
    """Of each pass, in set times."""


class VirtualTime:
    """A clock that goes on when its rank sleeps, and at no other time."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def stub_runner(
    exchanges: Sequence[Exchange], virtual: VirtualTime, tp: Collectives = ALONE, model: str = STUB
) -> StubRunner:
    config = ModelConfig(model=model, dtype="float32", device="cpu")
    made = StubRunner(
        plan_rank(config, EngineConfig(page_size=PAGE, kv_pages=15), tp=tp.size, shard=tp.rank),
        exchanges=exchanges,
        tp=tp,
        clock=StubTime(lambda: virtual.now, virtual.sleep),
    )
    made.pool.tensor.view(torch.uint8).random_(0, 256)
    return made


def compute_stub(runner: StubRunner, virtual: VirtualTime, replica: int, agreed: Sequence[Agreement]) -> StubPass:
    tokens, seconds = [], []
    for rows, each in zip(passes_of(replica), agreed, strict=True):
        began = virtual.now
        if rows:
            hidden = runner.forward(rows, None, each)
            tokens += [sample.token for sample in runner.sample(rows, hidden).result().samples]
        else:
            runner.join(each)
        seconds.append(virtual.now - began)
    kv = [pool_tokens(runner, each.pages, len(each.tokens)).contiguous() for each in prompts_of(replica)]
    return StubPass(tokens, [each.view(torch.int32) for each in kv], seconds)


def same(exchange: Exchange) -> Exchange:
    return exchange


def stub_by_ranks(
    tp: int, way: Way, *, cut: bool, wrapped: Callable[[Exchange], Exchange] = same, us: int = 0, tile: int = TILE
) -> list[StubPass]:
    """The stub model with two replicas. wrapped: made of the exchanges. us: of the exchanges, per token."""
    agreed = agreements(tp, way, cut=cut)
    across = [Meeting(2, DEADLINE_S) for _ in range(tp)]
    stage = Meeting(2 * tp, DEADLINE_S)

    def work(replica: int, shard: int, groups: Groups) -> StubPass:
        second = (groups[0], ThreadCollectives(across[shard], replica), ThreadCollectives(stage, groups[2].rank))
        exchanges = [
            wrapped(exchange_of(way, STUB_MOE, each, tile)) for each in ((groups, second) if cut else (groups,))
        ]
        virtual = VirtualTime()
        model = STUB.replace("hidden=16", f"hidden={16 * tp},heads={tp}") + f",us_per_exchange={us}"
        return compute_stub(stub_runner(exchanges, virtual, groups[0], model), virtual, replica, agreed)

    return run_stage(2, tp, work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_stub_says_the_same_in_halves(tp: int, way: Way) -> None:
    """And what it says without experts: none of its rows is lost on the way."""
    whole, halved = stub_by_ranks(tp, way, cut=False), stub_by_ranks(tp, way, cut=True)
    for rank, (found, expected) in enumerate(zip(halved, whole, strict=True)):
        assert found.tokens == expected.tokens
        assert (len(found.tokens) > 0) == (rank % tp == 0)
        assert all(map(torch.equal, found.kv, expected.kv))
    model = STUB.replace("hidden=16", f"hidden={16 * tp},heads={tp}")
    for replica in (0, 1):
        virtual = VirtualTime()
        alone = stub_runner((), virtual, model=model)
        tokens = [sample.token for rows in passes_of(replica) if rows for sample in alone.execute(rows).samples]
        assert halved[replica * tp].tokens == tokens


class Losing:
    """An exchange that loses the result of the last row of a second half."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.own = exchange.own
        self.begin = exchange.begin

    def run(self, x: torch.Tensor, mixture: Mixture) -> Steps[torch.Tensor]:
        """See Exchange."""
        sums = yield from self._exchange.run(x, mixture)
        if len(x) == 14:
            sums[-1] = 0
        return sums


@pytest.mark.parametrize("way", WAYS)
def test_the_stub_shows_a_row_that_is_lost_on_its_way(way: Way) -> None:
    good, bad = stub_by_ranks(1, way, cut=True), stub_by_ranks(1, way, cut=True, wrapped=Losing)
    assert bad[1].tokens == good[1].tokens, "it has no half of 14 rows"
    assert all(found != expected for found, expected in zip(bad[0].tokens, good[0].tokens, strict=True))


def test_a_cut_pass_takes_the_longer_of_computing_and_exchanging() -> None:
    """In set times. What is left over: the last result of the second half comes back while nothing is computed."""
    for us, whole_ms, halved_ms in ((0, 3.2, 3.2), (100, 3.2 + 3.2, 3.2 + 0.2), (300, 3.2 + 9.6, 9.6 + 0.2)):
        whole, halved = (stub_by_ranks(1, "alltoall", cut=cut, us=us, tile=TILE_TOKENS)[1] for cut in (False, True))
        assert whole.seconds[0] == pytest.approx(whole_ms / 1e3)
        assert halved.seconds[0] == pytest.approx(halved_ms / 1e3)
