"""Experts by grouped products, as GPUs compute them, beside the loop over experts; on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.operations import Collectives
from headrace.engine.collectives.steps import finish
from headrace.engine.dtypes import Precision
from headrace.engine.layers import moe as moe_module
from headrace.engine.layers.exchange import NoExchange, Replicated
from headrace.engine.layers.grouped_experts import GroupedExperts, read_stacked
from headrace.engine.layers.moe import Experts, MoeMlp
from headrace.engine.model import arithmetic
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.expert_choice import NO_EXPERT, ExpertChoice, choose
from headrace.engine.model.float8 import BLOCK, Float8Weight
from headrace.engine.model.weights import LayerReader
from tests.engine.collectives.threads import run_ranks
from tests.engine.layers.mixtures import SPECS, RandomWeights

HIDDEN = 32
MOE = replace(SPECS["qwen3"], intermediate_size=16)


def reader(dtype: torch.dtype) -> LayerReader:
    """Of weights in bfloat16, for computation in some dtype."""
    precision = Precision(torch.bfloat16, dtype, dtype, False)
    return LayerReader(RandomWeights(), 0, precision, "cpu", TorchArithmetic().pack)


def rows_and_choice(tokens: int) -> tuple[Tensor, ExpertChoice]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    return x, choose(torch.randn(tokens, MOE.experts, generator=generator), MOE)


@pytest.fixture(autouse=True)
def _unwritten_rows_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm leaves the rows behind the last group as they are."""
    product = F.grouped_mm

    def poisoned(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        result = product(a, b, offs=offs)
        result[int(offs[-1]) :] = torch.nan
        return result

    monkeypatch.setattr(arithmetic.F, "grouped_mm", poisoned)


@pytest.mark.parametrize("own", [range(MOE.experts), range(3), range(2, 7), range(9, 11)])
@pytest.mark.parametrize("tokens", [1, 2, 65])
def test_grouped_experts_give_the_sums_of_the_loop(own: range, tokens: int) -> None:
    x, choice = rows_and_choice(tokens)
    grouped = GroupedExperts(MOE, HIDDEN, own, reader(torch.bfloat16), TorchArithmetic())
    loop = Experts(MOE, HIDDEN, own, reader(torch.float32), TorchArithmetic())
    found, expected = grouped.compute(x, choice), loop.compute(x.float(), choice)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()) + 1e-6, rtol=0)
    assert torch.equal(grouped.counts, loop.counts)


def test_rows_are_counted_over_passes_and_none_are_for_no_expert() -> None:
    experts = GroupedExperts(MOE, HIDDEN, range(4), reader(torch.bfloat16), TorchArithmetic())
    x, choice = rows_and_choice(5)
    nowhere = choice._replace(experts=torch.full_like(choice.experts, NO_EXPERT))
    assert not experts.compute(x, nowhere).any()
    for _ in range(2):
        experts.compute(x, choice)
    assert experts.counts.tolist() == [2 * int((choice.experts == expert).sum()) for expert in range(4)]


SHARED = {
    "one of them": replace(SPECS["deepseek-v3"], intermediate_size=16, shared_size=16),
    "wider": replace(SPECS["deepseek-v2"], intermediate_size=16, shared_size=32),
}


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 65])
@pytest.mark.parametrize("name", SHARED)
def test_shared_experts_are_added_before_ranks_are_summed(
    name: str, tokens: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one more expert where they are alike. Each token's are computed by one rank."""
    moe = SHARED[name]
    x = rows_and_choice(tokens)[0]
    padding = torch.zeros(tokens, 1, dtype=torch.bool)
    padding[1::3] = True
    plain = MoeMlp(moe, HIDDEN, reader(torch.float32), TorchArithmetic(), (NoExchange(moe.experts),))
    expected = plain.forward(x.float())
    monkeypatch.setattr(moe_module, "can_group", lambda *_: True)  # as on a GPU

    def work(tp: Collectives) -> tuple[Tensor, Tensor, Tensor, bool]:
        exchange = Replicated(moe.experts, tp) if shards > 1 else NoExchange(moe.experts)
        made = MoeMlp(moe, HIDDEN, reader(torch.bfloat16), TorchArithmetic(), (exchange,))
        whole, counts = made.forward(x), made.counts.clone()
        return whole, counts, finish(made.steps(x, padding=padding)), made.joined

    results = run_ranks(shards, work)
    scale = float(expected.abs().max())
    known = ~padding[:, 0]
    for whole, _, padded, joined in results:
        assert joined == (name == "one of them")
        torch.testing.assert_close(whole.float(), expected, atol=0.03 * scale, rtol=0)
        torch.testing.assert_close(padded[known].float(), expected[known], atol=0.03 * scale, rtol=0)
    assert torch.equal(torch.cat([counts for _, counts, _, _ in results]), plain.counts)


def test_no_tokens() -> None:
    experts = GroupedExperts(MOE, HIDDEN, range(4), reader(torch.bfloat16), TorchArithmetic())
    x, choice = rows_and_choice(5)
    assert experts.compute(x[:0], ExpertChoice(choice.experts[:0], choice.weights[:0])).shape == (0, HIDDEN)


class InFloat8(RandomWeights):
    """Random weights that are stored in FP8, but for an expert's."""

    def __init__(self, otherwise: str = "") -> None:
        """otherwise: a part of the names of those that are not."""
        super().__init__()
        self._otherwise = otherwise

    def read_float8(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> Float8Weight | None:
        if self._otherwise and self._otherwise in name:
            return None
        values = self.read(name, shape).to(torch.float8_e4m3fn)
        scales = torch.rand(
            -(-shape[0] // BLOCK), shape[1] // BLOCK, generator=torch.Generator().manual_seed(len(name))
        )
        return Float8Weight(values, scales + 0.1, BLOCK)


def float8_reader(weights: InFloat8) -> LayerReader:
    precision = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, False, float8=True)
    return LayerReader(weights, 3, precision, "cpu", TorchArithmetic().pack)


def test_experts_in_float8_are_stacked() -> None:
    moe = replace(MOE, intermediate_size=BLOCK)
    read = float8_reader(InFloat8())
    _, down = read_stacked(moe, 2 * BLOCK, range(2, 5), read)
    assert isinstance(down, Float8Weight)
    for number, expert in enumerate(range(2, 5)):
        one = read.matrix({f"mlp.experts.{expert}.down_proj": 2 * BLOCK}, BLOCK)
        assert isinstance(one, Float8Weight)
        assert torch.equal(down.expanded()[number], one.expanded())


def test_experts_of_which_some_are_in_float8_are_refused() -> None:
    moe = replace(MOE, intermediate_size=BLOCK)
    with pytest.raises(ConfigError, match=r"^layer 3 has experts in FP8 and others; write --compile off"):
        read_stacked(moe, 2 * BLOCK, range(4), float8_reader(InFloat8("experts.2.")))
