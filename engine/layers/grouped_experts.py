"""Experts of an MoE layer on a GPU: one grouped matrix product for all of them, without a copy to the host.

    choice ──► rows sorted by expert ──► product of gate and up ──► gate ──► product of down ──► weighted sums

How many rows an expert has is known to the device alone (model/expert_rows.py), so the number of launches is the same
for any pass.
"""

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.model.arithmetic import Arithmetic, Weight
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


class Expert(NamedTuple):
    """The matrices of one expert, or of the shared ones that are joined to one."""

    gate_up: Weight
    """[2 * inner, hidden]"""
    down: Weight
    """[hidden, inner]"""


class GroupedExperts:
    """SwiGLU MLPs in bfloat16, of which this rank holds a range, and the count of rows that each has computed.

    Shared experts of the same form are one more, which tokens choose with weight 1.
    """

    def __init__(
        self,
        moe: MoeSpec,
        hidden: int,
        own: range,
        read: LayerReader,
        arithmetic: Arithmetic,
        shared: Expert | None = None,
    ) -> None:
        """Read the weights, expert by expert. own: the experts that this rank holds. shared: the shared ones, joined to
        one. Raises ConfigError for a missing or misshapen tensor."""
        self._arithmetic = arithmetic
        self._own = own
        also = None
        if shared is not None and all(map(_alike, read_expert(moe, hidden, own.start, read), shared)):
            also = shared
        self._gate_up, self._down = read_stacked(moe, hidden, own, read, also)
        self.shared = None if also is None else Expert(_last(self._gate_up), _last(self._down))
        """The shared experts, if they are one of them."""
        self._number = None if also is None else moe.experts
        self.counts = torch.zeros(len(own), dtype=torch.int64, device=read.device)
        """Rows computed by each own expert, on the device."""

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Weighted sums of the own experts' results for rows x [tokens, hidden size], in their dtype: [tokens, hidden
        size].

        Summed over a token's choices in float32, each rounded once.
        """
        if not len(x):
            return torch.zeros_like(x)
        rows = self._arithmetic.sort_rows(choice.experts, self._own, self.counts, self._number)
        gated = self._arithmetic.gated_experts(x, self._gate_up, rows, choice.experts.shape[1])
        results = self._arithmetic.grouped_linear(gated, self._down, rows)
        return self._arithmetic.combine_rows(results, rows, choice)


def read_expert(moe: MoeSpec, hidden: int, expert: int | None, read: LayerReader) -> Expert:
    """expert: None for the shared ones. Raises ConfigError for a missing or misshapen tensor."""
    gate, up, down = moe.projections
    name = f"{moe.module}.shared_experts" if expert is None else f"{moe.module}.experts.{expert}"
    inner = moe.shared_size if expert is None else moe.intermediate_size
    gate_up = read.matrix({f"{name}.{gate}": inner, f"{name}.{up}": inner}, hidden)
    return Expert(gate_up, read.matrix({f"{name}.{down}": hidden}, inner))


def read_stacked(
    moe: MoeSpec, hidden: int, own: range, read: LayerReader, shared: Expert | None = None
) -> tuple[Stacked, Stacked]:
    """Weights of experts: [experts, 2 * inner, hidden] of gate and up, [experts, hidden, inner] of down. shared: is put
    behind them. Raises ConfigError for a missing or misshapen tensor."""
    each = (read_expert(moe, hidden, expert, read) for expert in own)
    whole: list[Stacked] = []
    for index, expert in enumerate(each if shared is None else chain(each, [shared])):
        if not whole:
            whole = [_room(len(own) + (shared is not None), matrix) for matrix in expert]
        for stacked, matrix in zip(whole, expert, strict=True):
            if isinstance(stacked, Tensor) != isinstance(matrix, Tensor):
                raise ConfigError(
                    f"layer {read.layer} has experts in FP8 and others; write --compile off, which expands them all"
                )
            for all_of_them, part in zip(_tensors(stacked), _tensors(matrix), strict=True):
                all_of_them[index] = part
    return whole[0], whole[1]


def _tensors(weight: Weight) -> tuple[Tensor, ...]:
    assert isinstance(weight, Tensor | Float8Weight), "whole numbers of 8 bits are for CPUs"
    return (weight,) if isinstance(weight, Tensor) else (weight.values, weight.scales)


def _room(experts: int, weight: Weight) -> Stacked:
    """For so many weights like this."""
    made = [part.new_empty(experts, *part.shape) for part in _tensors(weight)]
    return Float8Weight(made[0], made[1], weight.rows) if isinstance(weight, Float8Weight) else made[0]


def _last(stacked: Stacked) -> Weight:
    if isinstance(stacked, Tensor):
        return stacked[-1]
    return stacked._replace(values=stacked.values[-1], scales=stacked.scales[-1])


def _alike(one: Weight, other: Weight) -> bool:
    """Whether weights can be put side by side."""
    return [(part.shape, part.dtype) for part in _tensors(one)] == [
        (part.shape, part.dtype) for part in _tensors(other)
    ]
