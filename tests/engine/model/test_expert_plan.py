"""Which way of exchange is taken, and the memory that is kept free for it."""

import pytest
import torch

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.operations import Alone
from headrace.engine.collectives.steps import finish
from headrace.engine.device import Computation
from headrace.engine.kv.memory_plan import plan_memory, weight_count
from headrace.engine.layers.exchange import AllGather, AllToAll, Replicated, make_exchange
from headrace.engine.layers.moe import MoeMlp
from headrace.engine.model.config import spec_from_config
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.expert_plan import Way, choose_way, exchange_bytes
from headrace.engine.model.sharding import part_of
from tests.engine.collectives.threads import ThreadCollectives
from tests.engine.layers.mixtures import HIDDEN, SPECS, Groups, make_mixture, random_rows, run_stage
from tests.engine.model.test_moe_spec import QWEN3

FLOAT32 = Computation("cpu", "float32", native=True)
MIXTRAL = SPECS["mixtral"]  # five experts, two of them for each token


@pytest.mark.parametrize(
    ("dp", "tp", "device", "expected"),
    [
        (1, 1, "cpu", "replicated"),
        (1, 4, "cpu", "replicated"),
        (2, 1, "cpu", "allgather"),
        (3, 1, "cpu", "alltoall"),
        (2, 2, "cpu", "alltoall"),
        (2, 2, "cuda", "allgather"),
    ],
)
def test_the_way_follows_from_ranks_and_device(dp: int, tp: int, device: str, expected: str) -> None:
    assert choose_way("auto", MIXTRAL, dp=dp, tp=tp, device=device) == expected
    assert choose_way("alltoall", MIXTRAL, dp=dp, tp=tp, device=device) == "alltoall"


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 experts cannot be divided among 6 ranks; write --expert-parallel with 5"):
        choose_way("auto", MIXTRAL, dp=3, tp=2, device="cpu")


def test_ways_are_made_of_groups() -> None:
    alone = Alone()
    ways: dict[Way, type] = {"replicated": Replicated, "allgather": AllGather, "alltoall": AllToAll}
    for way, kind in ways.items():
        exchange = make_exchange(way, MIXTRAL, alone, alone, alone)
        assert isinstance(exchange, kind)
        assert exchange.own == range(5)


class AllToFirst:
    """A mixture whose router sends every token to the experts of the first rank."""

    grouped = joined = False

    def __init__(self, mixture: MoeMlp) -> None:
        self._mixture = mixture

    def route(self, x: torch.Tensor, shared: slice | None = None) -> ExpertChoice:
        """See Mixture."""
        return ExpertChoice(torch.tensor([[0, 1]]).expand(len(x), 2), torch.ones(len(x), 2))

    def compute(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """See Mixture."""
        return self._mixture.compute(x, choice)

    def shared(self, x: torch.Tensor) -> None:
        """See Mixture."""


@pytest.mark.parametrize("way", ["allgather", "alltoall"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (1, 2)])
def test_memory_is_kept_for_the_worst_routing(way: Way, dp: int, tp: int) -> None:
    """All tokens of all replicas at one rank: what it receives and computes fits into what was kept free, and takes
    a good part of it."""
    tokens = 40
    kept = exchange_bytes(way, MIXTRAL, HIDDEN, 4, tokens, dp=dp, tp=tp) - exchange_bytes(
        "replicated", MIXTRAL, HIDDEN, 4, 0, dp=dp, tp=tp
    )

    def work(replica: int, shard: int, groups: Groups) -> int:
        exchange = make_exchange(way, MIXTRAL, *groups)
        exchange.begin([tokens] * dp, tokens)
        seen: list[int] = []
        mixture = make_mixture(MIXTRAL, exchange)
        compute = mixture.compute

        def noted(x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
            sums = compute(x, choice)
            parcels = len(x) * (HIDDEN * 4 + 2 * 2 * 4)
            seen.append(parcels + sums.numel() * sums.element_size())
            return sums

        mixture.compute = noted  # type: ignore[method-assign]
        finish(exchange.run(random_rows(tokens), AllToFirst(mixture)))
        assert isinstance(groups[2], ThreadCollectives)
        return max(seen)

    taken = max(run_stage(dp, tp, work))
    assert kept / 4 < taken < kept


@pytest.mark.parametrize("way", ["allgather", "alltoall"])
@pytest.mark.parametrize("tokens", [40, 1500, 5000])
def test_memory_is_kept_for_a_tile_of_each_half(way: Way, tokens: int) -> None:
    """Of 1024 tokens; a whole pass has one under way, halves of short passes are tiles of their own."""

    def kept(tokens: int, *, halved: bool) -> int:
        return exchange_bytes(way, MIXTRAL, HIDDEN, 4, tokens, dp=2, tp=1, halved=halved)

    row = kept(10, halved=False) - kept(9, halved=False)
    sums = HIDDEN * 4
    extra = kept(tokens, halved=True) - kept(tokens, halved=False)
    assert extra == (row - sums) * {40: 2, 1500: 1502 - 1024, 5000: 1024}[tokens]


def test_the_memory_plan_keeps_it_and_counts_own_experts_only() -> None:
    spec = spec_from_config(QWEN3)
    whole = plan_memory(part_of(spec), FLOAT32, 16, 0, 1 << 24, max_model_len=64)
    part = plan_memory(part_of(spec, experts=2, exchange_bytes=1 << 20), FLOAT32, 16, 0, 1 << 24, max_model_len=64)
    fewer = weight_count(part_of(spec)) - weight_count(part_of(spec, experts=2))
    assert whole.weight_bytes - part.weight_bytes == 4 * fewer
    assert "between experts 1.0 MiB" in part.explanation
    assert "exchange" not in whole.explanation
    with pytest.raises(ConfigError, match=r"the exchange of tokens between experts 16.0 MiB and 16.0 MiB are"):
        plan_memory(part_of(spec, exchange_bytes=1 << 24), FLOAT32, 16, 0, 1 << 24, max_model_len=64)
