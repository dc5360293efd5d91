"""What LoRA adapters (arXiv 2106.09685) add to linear layers, for the rows of a pass that go through them.

    pass        a a a a │ ─ ─ ─ │ b │ a        y  = x @ weight.T              of all rows, as without adapters
    groups      a: 0 1 2 3 8      b: 7         y[rows of a] += x[rows of a] @ down.T @ up.T

A group has all rows of one adapter. What is computed for a row depends on no other, since products do not.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.kv.device_copies import place
from headrace.engine.model.arithmetic import Arithmetic, HeadRules, KvSlots, Rows, Stream, Weight
from headrace.engine.model.weights import Deltas


class Group(NamedTuple):
    """The rows of a pass that go through one adapter."""

    adapter: str
    """Its fingerprint."""
    tokens: Tensor | None
    """int64 [rows], ascending; None: all of the pass."""


Groups = Sequence[Group]


def row_groups(spans: Sequence[AttentionSpan], device: torch.device) -> Groups:
    """The rows of a pass by the adapter that they go through; rows without one are in no group."""
    adapters = dict.fromkeys(span.adapter for span in spans)
    if not any(adapters):
        return ()
    if len(adapters) == 1:
        return tuple(Group(adapter, None) for adapter in adapters)
    of_token = np.repeat(np.array([span.adapter for span in spans]), [span.count for span in spans])
    return tuple(Group(adapter, place(np.flatnonzero(of_token == adapter), device)) for adapter in adapters if adapter)


def add_deltas(arithmetic: Arithmetic, x: Tensor, y: Tensor, deltas: Deltas, groups: Groups) -> Tensor:
    """Add to y [rows, out], in place, what the adapters of its rows make of x [rows, in]. Returns y."""
    for adapter, tokens in groups:
        if not (parts := deltas.get(adapter)):
            continue
        rows = x if tokens is None else x.index_select(0, tokens)
        for outputs, down, up in parts:
            added = arithmetic.linear(arithmetic.linear(rows, down), up)
            columns = y[:, outputs.start : outputs.stop]
            columns.add_(added) if tokens is None else columns.index_add_(0, tokens, added)
    return y


class AdaptedLinear(NamedTuple):
    """A linear layer, of a shard, with what adapters add to it."""

    arithmetic: Arithmetic
    weight: Weight
    """[out, in], from pack()."""
    bias: Tensor | None = None
    deltas: Deltas = MappingProxyType({})

    def __call__(self, x: Rows, groups: Groups) -> Tensor:
        """x [rows, in] → [rows, out]."""
        rows = self.arithmetic.normed(x)
        y = self.arithmetic.linear(rows, self.weight, self.bias)
        return add_deltas(self.arithmetic, rows, y, self.deltas, groups)

    def gated(self, x: Rows, groups: Groups) -> Tensor:
        """SwiGLU gate of the product, of a layer without bias: [rows, out / 2]."""
        if self._apart(groups):
            return self.arithmetic.gate(self(x, groups))
        return self.arithmetic.gated_linear(x, self.weight)

    def heads(
        self, x: Rows, groups: Groups, rules: HeadRules, cos: Tensor, sin: Tensor, slots: KvSlots | None
    ) -> Tensor:
        """See Arithmetic.head_linear()."""
        if not self._apart(groups):
            return self.arithmetic.head_linear(x, self.weight, self.bias, rules, cos, sin, slots)
        heads = rules.split(self(x, groups))
        self.arithmetic.place_heads(heads, rules, cos, sin, slots)
        return heads

    def add_to(self, hidden: Tensor, x: Tensor, groups: Groups) -> Tensor | Stream:
        """See Arithmetic.linear_to()."""
        if self._apart(groups):
            return self(x, groups)
        return self.arithmetic.linear_to(hidden, x, self.weight, self.bias)

    def _apart(self, groups: Groups) -> bool:
        """Whether the product is computed apart from what follows, since adapters come between. By the kernels for GPUs
        always where they may, so that what is rounded for a row does not depend on adapters of others."""
        return any(adapter in self.deltas for adapter, _ in groups) or (self.arithmetic.compiled and bool(self.deltas))
