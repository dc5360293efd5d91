"""Experts of an MoE layer on a GPU: one grouped matrix product for all of them, without a copy to the host.

    choice ──► rows sorted by expert ──► grouped_mm: gate and up ──► gate ──► grouped_mm: down ──► weighted sums

How many rows an expert has is known to the device alone (model/expert_rows.py), so the number of launches is the same
for any pass.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader

Stacked = Tensor | Float8Weight
"""Weights of experts, side by side."""

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
        self._gate_up, self._down = read_stacked(moe, hidden, own, read)
        self.counts = torch.zeros(len(own), dtype=torch.int64, device=read.device)
        """Rows computed by each own expert, on the device."""

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Weighted sums of the own experts' results for rows x [tokens, hidden size], in their dtype: [tokens, hidden
        size].

        Summed over a token's choices in float32, each rounded once.
        """
        if not len(x):
            return torch.zeros_like(x)
        rows = self._arithmetic.sort_rows(choice.experts, self._own, self.counts)
        taken = self._arithmetic.take_rows(x, rows, choice.experts.shape[1])
        gated = self._arithmetic.gate_rows(self._arithmetic.grouped_linear(taken, self._gate_up, rows), rows)
        results = self._arithmetic.grouped_linear(gated, self._down, rows)
        return self._arithmetic.combine_rows(results, rows, choice)


def read_stacked(moe: MoeSpec, hidden: int, own: range, read: LayerReader) -> tuple[Stacked, Stacked]:
    """Weights of experts: [experts, 2 * inner, hidden] of gate and up, [experts, hidden, inner] of down. Raises
    ConfigError for a missing or misshapen tensor."""
    gate, up, down = moe.projections
    inner = moe.intermediate_size

    def stack(parts: Mapping[str, int], width: int) -> Stacked:
        whole: list[Tensor] = []  # of the matrices, or of the values and the scales of those in FP8
        shared = 0
        for index, expert in enumerate(own):
            matrix = read.matrix({f"{moe.module}.experts.{expert}.{name}": rows for name, rows in parts.items()}, width)
            assert isinstance(matrix, Tensor | Float8Weight), "whole numbers of 8 bits are for CPUs"
            stored = (matrix,) if isinstance(matrix, Tensor) else (matrix.values, matrix.scales)
            if not index:
                whole = [part.new_empty(len(own), *part.shape) for part in stored]
                shared = 0 if isinstance(matrix, Tensor) else matrix.rows
            if len(stored) != len(whole):
                raise ConfigError(
                    f"layer {read.layer} has experts in FP8 and others; write --compile off, which expands them all"
                )
            for all_of_them, part in zip(whole, stored, strict=True):
                all_of_them[index] = part
        return Float8Weight(whole[0], whole[1], shared) if shared else whole[0]

    return stack({gate: inner, up: inner}, hidden), stack({down: hidden}, inner)
