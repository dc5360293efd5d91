"""Layer arithmetic apart from attention: linear layers, RMSNorm with residual, rotary embedding, SwiGLU gate."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.model import expert_choice, expert_rows, int8
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.model.int8 import Int8Weight
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.rope import rotate

Weight = Tensor | Int8Weight | Float8Weight
"""A matrix [out, in] of a linear layer."""


class HeadRules(NamedTuple):
    """How query, key and value heads that one product has made become those of attention."""

    query_heads: int
    kv_heads: int
    q_norm: Tensor | None = None
    """Weights [width] of RMSNorms of query and of key heads; both or neither."""
    k_norm: Tensor | None = None
    eps: float = 0.0

    @property
    def heads(self) -> int:
        """Of queries, keys and values."""
        return self.query_heads + 2 * self.kv_heads

    def split(self, joined: Tensor) -> Tensor:
        """Heads [tokens, heads, width] of what the product has made, [tokens, heads * width]."""
        return joined.view(len(joined), self.heads, joined.shape[1] // self.heads)


class LatentRules(NamedTuple):
    """How what one product has made of tokens becomes the latents of a pool (multi-head latent attention)."""

    query_norm: Tensor | None
    """Weights of the RMSNorm of the queries' latent; None: queries are heads, which have none."""
    latent_norm: Tensor
    """The same of the latent that keys and values are made of [kv_rank]."""
    rope_dim: int
    """Elements of the key that is rotated, behind the latent."""
    eps: float


class KvSlots(NamedTuple):
    """Where the keys and values of a pass's tokens go in one layer of a pool."""

    slots: Tensor
    """[slots, width], of the layer and all that follow."""
    first: Tensor
    """int64 [tokens]: the slot of each token's first key head; negative: its keys and values are written nowhere."""
    step: int
    """Slots from one head to the next; value heads follow key heads."""
    write: Callable[[Tensor], None]
    """Writes keys and values [tokens, 2 * kv_heads, width] there."""


class Stream(NamedTuple):
    """The residual stream behind a product that was added to it, of which a norm knows the power already."""

    hidden: Tensor
    """[rows, width]"""
    powers: Tensor
    """float32 [rows, parts]: sums of squares of parts of each row."""


class Normed(NamedTuple):
    """RMSNorm of the residual stream, which the product that takes it applies itself."""

    stream: Stream
    weight: Tensor
    """[width]"""
    eps: float


Rows = Tensor | Normed
"""Rows [rows, in] of a product."""


def unnormed(x: Rows) -> Tensor:
    """Rows as they are in memory."""
    return x.stream.hidden if isinstance(x, Normed) else x


class Arithmetic(Protocol):
    """The operations of a layer; implemented in torch, in Triton for GPUs (engine/triton) and in C (engine/native).

    Operations of several steps are here as those steps; an implementation may have a kernel for all of them.
    """

    compiled: bool = False
    """Kernels are compiled for the device, by Triton."""

    def pack(self, weight: Weight) -> Weight:
        """A weight [out, in] in the layout that linear() multiplies fastest, for rows of the same dtype if it is not in
        8 bits."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight.T + bias [out] → [rows, out], in x's dtype. weight: from pack()."""
        ...

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """x [rows, in] @ head.T → float32 [rows, out]: the output head [out, in], as an embedding is held."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta in place, unless delta is None; returns RMSNorm(hidden) * weight [width]. Rows
        may be strided where delta is None."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [rows, heads, width] in place. cos, sin: float32 [rows, 1, width] of rotary_tables."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """SwiGLU gate (arXiv 2002.05202): gate_up [rows, 2 * width] → silu(first half) * second half [rows, width]."""
        ...

    def normed(self, x: Rows) -> Tensor:
        """Rows that are normed."""
        return x if isinstance(x, Tensor) else self.add_norm(x.stream.hidden, None, x.weight, x.eps)

    def norm(self, hidden: Tensor, delta: Tensor | Stream | None, weight: Tensor, eps: float) -> Rows:
        """add_norm(), or what is to be normed where delta is in the residual stream already."""
        return Normed(delta, weight, eps) if isinstance(delta, Stream) else self.add_norm(hidden, delta, weight, eps)

    def gated_linear(self, x: Rows, gate_up: Weight) -> Tensor:
        """gate() of a product: x [rows, in] @ gate_up.T [in, 2 * width] → silu(first half) *
        second half [rows, width], with the bits of gate(linear()) on the CPU. gate_up: from pack()."""
        ...

    def head_linear(
        self,
        x: Rows,
        weight: Weight,
        bias: Tensor | None,
        rules: HeadRules,
        cos: Tensor,
        sin: Tensor,
        slots: KvSlots | None,
    ) -> Tensor:
        """place_heads() of a product: [tokens, query_heads + 2 * kv_heads, width], or only the query heads of it where
        there are slots."""
        heads = rules.split(self.linear(self.normed(x), weight, bias))
        self.place_heads(heads, rules, cos, sin, slots)
        return heads

    def linear_to(self, hidden: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor | Stream:
        """A product of x [rows, in] that is to be added to the residual stream hidden [rows, out]: [rows, out], or the
        stream to which it was added."""
        return self.linear(x, weight, bias)

    def place_heads(self, heads: Tensor, rules: HeadRules, cos: Tensor, sin: Tensor, slots: KvSlots | None) -> None:
        """Norm and rotate query and key heads of [tokens, query_heads + 2 * kv_heads, width] in place, then write keys
        and values to slots, if any. Keys and values in heads have no meaning then."""
        query, keys = heads[:, : rules.query_heads], heads[:, rules.query_heads : -rules.kv_heads]
        for part, weight in ((query, rules.q_norm), (keys, rules.k_norm)):
            if weight is not None:
                part.copy_(self.add_norm(part.flatten(0, 1), None, weight, rules.eps).view_as(part))
        self.rotate(heads[:, : -rules.kv_heads], cos, sin)
        if slots is not None:
            slots.write(heads[:, rules.query_heads :])

    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [rows, heads, width] in place as DeepSeek does: element 2i with 2i + 1. Rows and heads may be
        strided. cos, sin: as for rotate(), which turns the i-th elements of both halves."""
        rows, heads, width = x.shape
        pairs = x.view(rows, heads, width // 2, 2)
        halves = torch.cat(pairs.unbind(-1), dim=-1)  # a copy, of a single pair too
        self.rotate(halves, cos, sin)
        pairs.copy_(halves.view(rows, heads, 2, width // 2).transpose(-1, -2))

    def place_latents(
        self, joined: Tensor, rules: LatentRules, cos: Tensor, sin: Tensor, slots: KvSlots | None
    ) -> tuple[Tensor, Tensor]:
        """joined [tokens, query width + kv_rank + rope_dim] → the queries' part [tokens, query width], and latents
        [tokens, 1, kv_rank + rope_dim] as a pool holds them: normed, the key rotated in pairs. With slots they are
        written there, too. joined may be overwritten."""
        rank, key_at = len(rules.latent_norm), joined.shape[1] - rules.rope_dim
        query, latent, key = joined[:, : key_at - rank], joined[:, key_at - rank : key_at], joined[:, key_at:]
        if rules.query_norm is not None:
            query = self.add_norm(query, None, rules.query_norm, rules.eps)
        latents = torch.cat((self.add_norm(latent, None, rules.latent_norm, rules.eps), key), 1)[:, None]
        self.rotate_pairs(latents[..., rank:], cos, sin)
        if slots is not None:
            slots.write(latents)
        return query, latents

    def pack_float32(self, weight: Tensor) -> Weight:
        """A weight [out, in], not in 8 bits, for linear_float32()."""
        return self.pack(weight.float())

    def linear_float32(self, x: Tensor, weight: Weight) -> Tensor:
        """x [rows, in] @ weight.T → float32 [rows, out], rounded nowhere else. weight: from pack_float32()."""
        return self.linear(x.float(), weight)

    def choose(
        self, logits: Tensor, moe: MoeSpec, bias: Tensor | None = None, shared: slice | None = None
    ) -> ExpertChoice:
        """The best k experts by the router's logits, and the shared ones. See expert_choice.choose()."""
        return expert_choice.choose(logits, moe, bias, shared)

    def sort_rows(self, experts: Tensor, own: range, counts: Tensor, shared: int | None = None) -> SortedRows:
        """Rows of a rank's experts, in their order. See expert_rows.sort_rows()."""
        return expert_rows.sort_rows(experts, own, counts, shared)

    def take_rows(self, x: Tensor, rows: SortedRows, k: int) -> Tensor:
        """See expert_rows.take_rows()."""
        return expert_rows.take_rows(x, rows, k)

    def grouped_linear(self, x: Tensor, weight: Tensor | Float8Weight, rows: SortedRows) -> Tensor:
        """Rows x [rows, in] of experts, each @ its expert's weight [experts, out, in].T → [rows, out]. On a GPU,
        in bfloat16."""
        whole = weight.expanded().to(x.dtype) if isinstance(weight, Float8Weight) else weight
        return F.grouped_mm(x, whole.transpose(1, 2), offs=rows.ends)

    def gated_experts(self, x: Tensor, gate_up: Tensor | Float8Weight, rows: SortedRows, k: int) -> Tensor:
        """Rows of x [tokens, in] in the order of experts, each @ its expert's gate_up [experts, 2 * width, in].T and
        gated: [tokens * k, width]."""
        return self.gate_rows(self.grouped_linear(self.take_rows(x, rows, k), gate_up, rows), rows)

    def gate_rows(self, gate_up: Tensor, rows: SortedRows) -> Tensor:
        """gate() of the rows that have a meaning."""
        return self.gate(gate_up)

    def combine_rows(self, results: Tensor, rows: SortedRows, choice: ExpertChoice) -> Tensor:
        """See expert_rows.combine_rows()."""
        return expert_rows.combine_rows(results, rows, choice)


class TorchArithmetic(Arithmetic):
    """Arithmetic in plain torch, on any device and in any dtype."""

    def pack(self, weight: Weight) -> Weight:
        """The weight itself."""
        return weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Arithmetic."""
        return linear(x, weight, bias)

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """See Arithmetic."""
        return linear(x, head).float()

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See Arithmetic."""
        return add_norm(hidden, delta, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Arithmetic."""
        rotate(x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        """See Arithmetic."""
        return gate(gate_up)

    def gated_linear(self, x: Rows, gate_up: Weight) -> Tensor:
        """See Arithmetic."""
        return self.gate(self.linear(self.normed(x), gate_up))


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight [out, in].T + bias [out] → [rows, out]; weight and bias are converted to x's dtype."""
    if isinstance(weight, Int8Weight):
        return int8.linear(x, weight, bias)
    if isinstance(weight, Float8Weight):
        weight = weight.expanded()
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """hidden [rows, width] += delta in place, unless delta is None; returns RMSNorm(hidden) * weight [width]."""
    return rms_norm(hidden if delta is None else hidden.add_(delta), weight, eps)


def gate(gate_up: Tensor) -> Tensor:
    """SwiGLU gate (arXiv 2002.05202): gate_up [rows, 2 * width] → silu(first half) * second half [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467) over the last axis of x [rows, width], times weight [width].

    Computed in float32 and rounded to x's dtype before the weight is applied, as transformers does.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
