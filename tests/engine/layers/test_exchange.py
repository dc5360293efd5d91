"""Experts divided among ranks give what one rank with all experts gives, in every way of exchange."""

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch

from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.layers.exchange import (
    NO_EXPERT,
    AllGather,
    AllToAll,
    Exchange,
    ExpertChoice,
    Replicated,
    pack,
    unpack,
)
from headrace.engine.model.expert_plan import own_experts, parcel_bytes
from headrace.engine.model.moe_spec import MoeSpec
from tests.engine.collectives.threads import ThreadCollectives
from tests.engine.layers.mixtures import (
    HIDDEN,
    KERNELS,
    SPECS,
    Groups,
    RandomWeights,
    make_mixture,
    needs_kernels,
    random_rows,
    run_stage,
)

TILE = 8  # tokens: small, so that passes take several
LAYOUTS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
TOKENS: list[tuple[int, ...]] = [(9, 9, 9, 9), (1, 30, 0, 7), (0, 5, 0, 0), (17, 2, 40, 1)]
Make = Callable[[MoeSpec, Groups], Exchange]


def by_all_gather(moe: MoeSpec, groups: Groups) -> Exchange:
    return AllGather(moe.experts, groups[0], groups[1], TILE)


def by_all_to_all(moe: MoeSpec, groups: Groups) -> Exchange:
    return AllToAll(moe, groups[0], groups[2], TILE)


def by_padded_all_to_all(moe: MoeSpec, groups: Groups) -> Exchange:
    """As on a GPU."""
    exchange = AllToAll(moe, groups[0], groups[2], TILE)
    exchange._exchange = exchange._padded
    return exchange


def by_replication(moe: MoeSpec, groups: Groups) -> Exchange:
    return Replicated(moe.experts, groups[0])


WAYS = {"all-gather": by_all_gather, "all-to-all": by_all_to_all, "padded all-to-all": by_padded_all_to_all}


def exchanged(
    moe: MoeSpec, make: Make, dp: int, tp: int, rows: Sequence[torch.Tensor], passes: int = 1
) -> list[torch.Tensor]:
    """Results at each rank, for the rows of each replica."""
    counts = [len(each) for each in rows]

    def work(replica: int, shard: int, groups: Groups) -> torch.Tensor:
        exchange = make(moe, groups)
        mixture = make_mixture(moe, exchange)
        for _ in range(passes):
            exchange.begin(counts, max(counts))
            result = mixture.forward(rows[replica].clone())
        return result

    return run_stage(dp, tp, work)


@pytest.mark.parametrize("counts", TOKENS)
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPECS)
def test_ranks_together_equal_one_rank(name: str, way: str, dp: int, tp: int, counts: tuple[int, ...]) -> None:
    moe = SPECS[name]
    rows = [random_rows(count, seed) for seed, count in enumerate(counts[:dp])]
    whole = make_mixture(moe)
    results = exchanged(moe, WAYS[way], dp, tp, rows)
    for replica, x in enumerate(rows):
        expected = whole.forward(x)
        for shard in range(tp):
            found = results[replica * tp + shard]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
            assert torch.equal(found, results[replica * tp])
            assert dp * tp > 1 or KERNELS is None or torch.equal(found, expected)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECS)
def test_shards_with_all_tokens_equal_one_rank(name: str, tp: int) -> None:
    x = random_rows(21)
    expected = make_mixture(SPECS[name]).forward(x)
    results = exchanged(SPECS[name], by_replication, 1, tp, [x])
    for found in results:
        assert torch.equal(found, results[0])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert tp > 1 or KERNELS is None or torch.equal(found, expected)


@needs_kernels
@pytest.mark.parametrize("way", WAYS)
def test_additions_of_two_terms_are_exact(way: str) -> None:
    """With two experts per token the order of additions cannot matter, so the bits are those of one rank."""
    moe = SPECS["mixtral"]
    rows = [random_rows(20, 1), random_rows(3, 2), random_rows(0), random_rows(11, 3)]
    whole = make_mixture(moe)
    for replica, found in enumerate(exchanged(moe, WAYS[way], 4, 1, rows)):
        assert torch.equal(found, whole.forward(rows[replica]))


@needs_kernels
def test_rows_do_not_depend_on_what_other_replicas_send() -> None:
    """By all-to-all, where results are added in a fixed order."""
    moe, x = SPECS["qwen3"], random_rows(13)
    alone = exchanged(moe, by_all_to_all, 3, 1, [x, random_rows(0), random_rows(0)])[0]
    for others in ((40, 0), (1, 25)):
        rows = [x, *(random_rows(count, 7) for count in others)]
        assert torch.equal(exchanged(moe, by_all_to_all, 3, 1, rows)[0], alone)


@needs_kernels
@pytest.mark.parametrize("way", [*WAYS, "replication"])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v2", "deepseek-v3"])
def test_rows_do_not_depend_on_their_place(name: str, tp: int, way: str) -> None:
    """Another place in the pass puts a row into another shard's slice."""
    moe, make = SPECS[name], {**WAYS, "replication": by_replication}[way]
    x = random_rows(7)
    alone = exchanged(moe, make, 1, tp, [x])[0]
    for before, after in ((1, 0), (0, 9), (5, 30)):
        rows = torch.cat([random_rows(before, 1), x, random_rows(after, 2)])
        found = exchanged(moe, make, 1, tp, [rows])[0]
        assert torch.equal(found[before : before + len(x)], alone)


def test_a_token_goes_once_to_each_rank_that_has_its_experts() -> None:
    """Rows computed over all ranks are k for each token; rows sent are one for each rank with any of its experts."""
    moe, counts = SPECS["deepseek-v2"], (6, 0, 19)
    rows = [random_rows(count, seed) for seed, count in enumerate(counts)]
    sent: list[int] = []

    def work(replica: int, shard: int, groups: Groups) -> list[int]:
        exchange = AllToAll(moe, groups[0], groups[2])
        mixture = make_mixture(moe, exchange)
        exchange.begin(counts)
        mixture.forward(rows[replica])
        choice = mixture.route(rows[replica])
        sent.extend(len({expert * 3 // moe.experts for expert in of_token}) for of_token in choice.experts.tolist())
        ep = groups[2]
        assert isinstance(ep, ThreadCollectives)
        assert len([name for name in ep.operations if name.startswith("all_to_all")]) == 3  # counts, rows, results
        return [int(mixture.counts.sum())]

    computed = run_stage(3, 1, work)
    assert sum(count for (count,) in computed) == moe.top_k * sum(counts)
    assert sum(sent) < moe.top_k * sum(counts)


@pytest.mark.parametrize("way", WAYS)
def test_padding_and_idle_replicas_are_never_computed(way: str) -> None:
    moe, counts = SPECS["qwen3"], (3, 0)

    def work(replica: int, shard: int, groups: Groups) -> int:
        exchange = WAYS[way](moe, groups)
        mixture = make_mixture(moe, exchange)
        exchange.begin(counts, 12)
        mixture.forward(random_rows(counts[replica], 1))
        return int(mixture.counts.sum())

    assert sum(run_stage(2, 1, work)) == moe.top_k * 3


@pytest.mark.parametrize("way", WAYS)
def test_an_idle_replica_enters_the_exchange_and_nothing_else(way: str) -> None:
    """Its shards all know that it has no tokens, so they have nothing to add up or to gather."""
    moe, counts = SPECS["deepseek-v3"], (9, 0)

    def work(replica: int, shard: int, groups: Groups) -> tuple[int, int]:
        exchange = WAYS[way](moe, groups)
        mixture = make_mixture(moe, exchange)
        exchange.begin(counts, 9)
        mixture.forward(random_rows(counts[replica]))
        tp, *others = (group for group in groups if isinstance(group, ThreadCollectives))
        return len(tp.operations), sum(len(group.operations) for group in others)

    busy, _, idle, _ = run_stage(2, 2, work)
    assert busy[0] > 0
    assert idle[0] == 0
    assert busy[1] == idle[1] > 0


def test_ranks_are_sent_the_numbers_of_their_own_experts_only() -> None:
    """A rank could hold a copy of an expert that another rank was chosen for."""
    moe, counts = SPECS["qwen3"], (9, 4, 0)

    def work(replica: int, shard: int, groups: Groups) -> tuple[range, set[int]]:
        exchange = by_all_to_all(moe, groups)
        mixture = make_mixture(moe, exchange)
        compute, seen = mixture.compute, set[int]()

        def noted(x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
            seen.update(choice.experts.flatten().tolist())
            return compute(x, choice)

        mixture.compute = noted  # type: ignore[method-assign]
        exchange.begin(counts)
        mixture.forward(random_rows(counts[replica], replica))
        return exchange.own, seen

    for own, seen in run_stage(3, 1, work):
        assert seen <= {NO_EXPERT, *own}


def test_all_ranks_exchange_equally_often_in_every_pass() -> None:
    """Replicas of 0, 1 and 40 tokens in tiles of 8: the same operations in the same order at all ranks of a group."""
    moe = SPECS["mixtral"]
    rows = [random_rows(count, count) for count in (0, 1, 40)]
    whole = make_mixture(moe)
    for make in WAYS.values():
        for replica, found in enumerate(exchanged(moe, make, 3, 1, rows, passes=3)):
            torch.testing.assert_close(found, whole.forward(rows[replica]), atol=2e-5, rtol=2e-5)


def test_ranks_read_their_experts_only() -> None:
    moe = SPECS["qwen3"]

    def work(replica: int, shard: int, groups: Groups) -> set[int]:
        checkpoint = RandomWeights()
        make_mixture(moe, AllToAll(moe, groups[0], groups[2]), checkpoint=checkpoint)
        return {int(name.split(".")[5]) for name in checkpoint.read_names if ".experts." in name}

    assert run_stage(2, 2, work) == [set(own_experts(11, 4, rank)) for rank in range(4)]
    assert [len(own_experts(11, 4, rank)) for rank in range(4)] == [2, 3, 3, 3]


def test_a_padded_count_that_is_too_small_is_refused() -> None:
    def work(replica: int, shard: int, groups: Groups) -> None:
        by_all_gather(SPECS["qwen3"], groups).begin((4, 9), 8)

    with pytest.raises(ValueError, match="9 tokens of a replica do not fit into a padded count of 8"):
        run_stage(2, 1, work)


def test_a_rank_that_fails_breaks_the_exchange_of_the_others() -> None:
    def work(replica: int, shard: int, groups: Groups) -> None:
        exchange = by_all_to_all(SPECS["mixtral"], groups)
        mixture = make_mixture(SPECS["mixtral"], exchange)
        exchange.begin((4, 4))
        if replica:
            raise RuntimeError("this rank has failed")
        with pytest.raises(LinkBroken, match="this rank has failed"):
            mixture.forward(random_rows(4))

    with pytest.raises(RuntimeError, match="this rank has failed"):
        run_stage(2, 1, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parcels_bring_rows_experts_and_weights(dtype: torch.dtype) -> None:
    x = random_rows(5, dtype=dtype)
    choice = ExpertChoice(torch.tensor([[3, NO_EXPERT]] * 5), torch.rand(5, 2))
    parcels = pack(x, choice, rows=7)
    assert parcels.shape[1] * parcels.element_size() == parcel_bytes(HIDDEN, 2, x.element_size())
    rows, found = unpack(parcels, 2, dtype)
    assert torch.equal(rows[:5], x)
    assert torch.equal(found.experts[:5], choice.experts)
    assert torch.equal(found.weights[:5], choice.weights)
    assert (found.experts[5:] == NO_EXPERT).all()


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.full)])
def test_processes(dp: int, tp: int) -> None:
    """Over Gloo, with an idle replica, in float32 and bfloat16."""
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    store.close()
    command = [sys.executable, "-m", "tests.engine.layers.rank", str(port), str(dp), str(tp)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(dp * tp)]
    for process in ranks:
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
