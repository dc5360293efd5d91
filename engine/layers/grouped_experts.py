"""Experts of an MoE layer on a GPU: one grouped matrix product for all of them, without a copy to the host.

    choice ──► rows sorted by expert ──► grouped_mm: gate and up ──► gate ──► grouped_mm: down ─┐
    weighted sums ◄── results in order of tokens ◄──────────────────────────────────────────────┘

How many rows an expert has is known to the device alone, so the number of launches is the same for any pass.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.layers.exchange import ExpertChoice
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader

ALIGNMENT = 8  # elements: grouped_mm takes rows of a multiple of 16 bytes


def can_group(moe: MoeSpec, hidden: int, read: LayerReader) -> bool:
    """Whether GroupedExperts computes these experts: on a GPU, in bfloat16."""
    aligned = hidden % ALIGNMENT == 0 and moe.intermediate_size % ALIGNMENT == 0
    return not read.on_cpu and read.dtype == torch.bfloat16 and aligned


class GroupedExperts:
    """SwiGLU MLPs in bfloat16, of which this rank holds a range, and the count of rows that each has computed."""

    def __init__(self, moe: MoeSpec, hidden: int, own: range, read: LayerReader, arithmetic: Arithmetic) -> None:
        """Read the weights, expert by expert. own: the experts that this rank holds. Raises ConfigError for a missing
        or misshapen tensor."""
        self._arithmetic = arithmetic
        self._own = own
        self._all = len(own) == moe.experts
        self._gate_up, self._down = read_stacked(moe, hidden, own, read)
        device = self._down.device
        self._numbers = torch.arange(len(own), device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        # The last one counts rows of other ranks' experts.
        self._counted = torch.zeros(len(own) + 1, dtype=torch.int64, device=device)
        self.rows = torch.zeros(len(own), dtype=torch.int64, pin_memory=device.type == "cuda")
        """Rows computed by each own expert, as of the last publish() that the device has come to."""

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Weighted sums of the own experts' results for rows x [tokens, hidden size], in their dtype: [tokens, hidden
        size].

        Summed over a token's choices in float32, each rounded once.
        """
        tokens, k = choice.experts.shape
        if not tokens:
            return torch.zeros_like(x)
        numbers = choice.experts.flatten()
        if not self._all:
            numbers = numbers - self._own.start
            elsewhere = (numbers < 0) | (numbers >= len(self._own))
            numbers = numbers.masked_fill_(elsewhere, len(self._own))
        self._counted.index_add_(0, numbers, self._one.expand(len(numbers)))
        ordered, order = numbers.sort(stable=True)
        ends = torch.searchsorted(ordered, self._numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // k)
        gated = self._arithmetic.gate(F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=ends))
        results = F.grouped_mm(gated, self._down.transpose(1, 2), offs=ends)
        if not self._all:  # what no expert has computed is memory of others
            results.masked_fill_((ordered == len(self._own))[:, None], 0)
        back = torch.empty_like(results).index_copy_(0, order, results).view(tokens, k, -1)
        return torch.bmm(choice.weights.to(x.dtype)[:, None], back)[:, 0]

    def publish(self) -> None:
        """Have the rows that were counted copied to the host, without waiting for it."""
        self.rows.copy_(self._counted[:-1], non_blocking=True)


def read_stacked(moe: MoeSpec, hidden: int, own: range, read: LayerReader) -> tuple[Tensor, Tensor]:
    """Weights of experts: [experts, 2 * inner, hidden] of gate and up, [experts, hidden, inner] of down. Raises
    ConfigError for a missing or misshapen tensor."""
    gate, up, down = moe.projections
    inner = moe.intermediate_size

    def stack(parts: Mapping[str, int], width: int) -> Tensor:
        whole = torch.empty(0)
        for index, expert in enumerate(own):
            names = {f"{moe.module}.experts.{expert}.{name}": rows for name, rows in parts.items()}
            matrix = read.matrix(names, width)
            assert isinstance(matrix, Tensor), "8 bits are for CPUs"
            if not index:
                whole = matrix.new_empty(len(own), *matrix.shape)
            whole[index] = matrix
        return whole

    return stack({gate: inner, up: inner}, hidden), stack({down: hidden}, inner)
