"""Layer arithmetic by Triton kernels: one launch for each operation, two for products in FP8."""

import torch
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.model.arithmetic import (
    HeadRules,
    KvSlots,
    LatentRules,
    Rows,
    Stream,
    TorchArithmetic,
    Weight,
    unnormed,
)
from headrace.engine.model.expert_choice import SMALLEST_SUM, ExpertChoice
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import BLOCK, Float8Weight
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.triton import kernels, latents
from headrace.engine.triton.launch import launch, power_of_2
from headrace.engine.triton.products import (
    FEW_ROWS,
    FLOAT8_TILES,
    HALVES,
    Float8Rows,
    Grouped,
    OwnProducts,
    Placing,
    Tile,
    multiply,
    values_of,
)

TILE = 2048  # elements of a row that one program computes at most, where it need not have all
HEAD_TILE = 2048  # elements of heads that one program turns
PLACES = 4096  # choices that one program looks at together, for those of its expert


class TritonArithmetic(TorchArithmetic):
    """Arithmetic for GPUs, with the results of TorchArithmetic up to the order of sums. A kernel is compiled at the
    first call with new widths: all of them by the first forward pass. Rows are contiguous unless something else is
    said."""

    compiled = True

    def __init__(self, own: OwnProducts | None = None) -> None:
        """own: which products do what surrounds them."""
        self._own = own or OwnProducts()

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See Arithmetic."""
        rows, width = hidden.shape
        normed = torch.empty(rows, width, dtype=hidden.dtype, device=hidden.device)
        if rows:
            launch(
                kernels.add_norm, (rows,), hidden, hidden if delta is None else delta, weight, normed, width, eps,
                hidden.stride(0), ADDS=delta is not None, BLOCK=power_of_2(width),
                num_warps=8 if width > TILE else 4,
            )  # fmt: skip
        return normed

    def gate(self, gate_up: Tensor) -> Tensor:
        """See Arithmetic."""
        return _gate(gate_up, None)

    def gate_rows(self, gate_up: Tensor, rows: SortedRows) -> Tensor:
        """See Arithmetic."""
        return _gate(gate_up, rows.total)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Arithmetic. In FP8 where the weight is."""
        if not isinstance(weight, Float8Weight):
            return super().linear(x, weight, bias)
        return self._in_float8(x, weight, bias, None)

    def gated_linear(self, x: Rows, gate_up: Weight) -> Tensor:
        """See Arithmetic."""
        tile = self._own.tile("gated", x, gate_up)
        return super().gated_linear(x, gate_up) if tile is None else self._gated(x, gate_up, None, tile)

    def gated_experts(self, x: Tensor, gate_up: Tensor | Float8Weight, rows: SortedRows, k: int) -> Tensor:
        """See Arithmetic."""
        tile = self._own.tile("gated", x, gate_up)
        if tile is None:
            return super().gated_experts(x, gate_up, rows, k)
        return self._gated(x, gate_up, Grouped(rows, k), tile)

    def _gated(self, x: Rows, gate_up: Weight, grouped: Grouped | None, tile: Tile) -> Tensor:
        values, rows = values_of(gate_up), unnormed(x)
        assert values is not None
        out = rows.new_empty(len(grouped.rows.sources if grouped else rows), values.shape[-2] // 2)
        multiply("gated", self._factors(x, gate_up), gate_up, out, tile, grouped=grouped)
        return out

    def linear_to(self, hidden: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor | Stream:
        """See Arithmetic. In float16 weights of the norm times rows that are not normed may be too large."""
        tile = self._own.tile("added", x, weight) if hidden.dtype == torch.bfloat16 else None
        if tile is None:
            return self.linear(x, weight, bias)
        return Stream(hidden, multiply("added", self._factors(x, weight), weight, hidden, tile, bias=bias))

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
        """See Arithmetic."""
        width = cos.shape[-1]
        tile = self._own.tile("heads", x, weight, width // 2) if slots and width // 2 in HALVES else None
        if slots is None or tile is None:
            return super().head_linear(x, weight, bias, rules, cos, sin, slots)
        out = unnormed(x).new_empty(len(cos), rules.query_heads, width)
        placing = Placing(rules, cos, sin, slots)
        multiply("heads", self._factors(x, weight), weight, out, tile, bias=bias, placing=placing)
        return out

    def _factors(self, x: Rows, weight: Weight) -> Rows | Float8Rows:
        """Rows as they are multiplied."""
        return self.quantize_rows(self.normed(x)) if isinstance(weight, Float8Weight) else x

    def grouped_linear(self, x: Tensor, weight: Tensor | Float8Weight, rows: SortedRows) -> Tensor:
        """See Arithmetic. In FP8 where the weight is."""
        if not isinstance(weight, Float8Weight):
            return super().grouped_linear(x, weight, rows)
        return self._in_float8(x, weight, None, rows)

    def place_heads(self, heads: Tensor, rules: HeadRules, cos: Tensor, sin: Tensor, slots: KvSlots | None) -> None:
        """See Arithmetic."""
        tokens, count, width = heads.shape
        if not tokens:
            return
        half = power_of_2(width // 2)
        tile = max(1, min(power_of_2(count), HEAD_TILE // (2 * half)))
        normed, nothing = rules.q_norm is not None, heads
        launch(
            kernels.place_heads, (tokens, ceil_div(count, tile)), heads, cos, sin,
            rules.q_norm if normed else nothing, rules.k_norm if normed else nothing,
            slots.slots if slots else nothing, slots.first if slots else nothing, rules.eps, slots.step if slots else 0,
            QUERY=rules.query_heads, KV=rules.kv_heads, HALF=width // 2, NORMED=normed, PLACED=slots is not None,
            ROWS=tile, BLOCK=half,
        )  # fmt: skip

    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Arithmetic."""
        tokens, heads, width = x.shape
        block = power_of_2(width // 2)
        tile = max(1, min(power_of_2(heads), HEAD_TILE // (2 * block)))
        if tokens:
            launch(
                latents.rotate_pairs, (tokens, ceil_div(heads, tile)), x, cos, sin, heads, x.stride(0), x.stride(1),
                HALF=width // 2, ROWS=tile, BLOCK=block,
            )  # fmt: skip

    def place_latents(
        self, joined: Tensor, rules: LatentRules, cos: Tensor, sin: Tensor, slots: KvSlots | None
    ) -> tuple[Tensor, Tensor]:
        """See Arithmetic."""
        (tokens, width), rank = joined.shape, len(rules.latent_norm)
        slot, normed = rank + rules.rope_dim, rules.query_norm is not None
        query = joined.new_empty(tokens, width - slot) if normed else joined[:, :-slot]
        made, into = joined.new_empty(tokens, 1, slot), slots.slots if slots else joined
        if tokens:
            launch(
                latents.place_latents, (tokens, 1 + normed), joined, query, made, into, cos, sin,
                rules.query_norm if normed else joined, rules.latent_norm, slots.first if slots else joined, rules.eps,
                QUERY=width - slot, RANK=rank, HALF=rules.rope_dim // 2, NORMED=normed, PLACED=slots is not None,
                QUERY_BLOCK=power_of_2(width - slot), RANK_BLOCK=power_of_2(rank),
                BLOCK=power_of_2(rules.rope_dim // 2),
            )  # fmt: skip
        return query, made

    def pack_float32(self, weight: Tensor) -> Tensor:
        """See Arithmetic. The weight itself: products are summed in float32."""
        return weight

    def linear_float32(self, x: Tensor, weight: Weight) -> Tensor:
        """See Arithmetic."""
        assert isinstance(weight, Tensor), "routers are not in 8 bits"
        if x.dtype == torch.float32 or x.device.type == "cpu":
            return super().linear(x.float(), weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    def choose(
        self, logits: Tensor, moe: MoeSpec, bias: Tensor | None = None, shared: slice | None = None
    ) -> ExpertChoice:
        """See Arithmetic. Of equal scores the first."""
        (tokens, count), k = logits.shape, moe.top_k + (shared is not None)
        experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
        weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
        if tokens:
            launch(
                kernels.choose, (tokens,), logits, logits if bias is None else bias, experts, weights,
                logits.stride(0), moe.scaling, SMALLEST_SUM if moe.scores == "sigmoid" else 0.0,
                shared.start if shared else 0, shared.stop if shared else 0,
                EXPERTS=count, K=moe.top_k, GROUPS=moe.groups, TOP_GROUPS=moe.top_groups,
                TWO_BEST=moe.group_score == "two best", SIGMOID=moe.scores == "sigmoid", BIASED=bias is not None,
                NORMALIZED=moe.normalized, ROUNDED=moe.rounded_weights, SHARED=shared is not None,
                BLOCK=power_of_2(count), K_BLOCK=power_of_2(moe.top_k),
                GROUP_BLOCK=power_of_2(moe.groups), num_warps=1,
            )  # fmt: skip
        return ExpertChoice(experts, weights)

    def sort_rows(self, experts: Tensor, own: range, counts: Tensor, shared: int | None = None) -> SortedRows:
        """See Arithmetic."""
        total, held = experts.numel(), len(own) + (shared is not None)
        sources, places = (torch.empty(total, dtype=torch.int32, device=experts.device) for _ in range(2))
        ends = torch.empty(held, dtype=torch.int32, device=experts.device)
        launch(
            kernels.place_rows, (held,), experts.contiguous(), counts, ends, sources, places, total, own.start,
            -1 if shared is None else shared, OWN=len(own), SHARED=shared is not None,
            BLOCK=min(PLACES, power_of_2(total)), num_warps=8,
        )  # fmt: skip
        return SortedRows(sources, places, ends)

    def take_rows(self, x: Tensor, rows: SortedRows, k: int) -> Tensor:
        """See Arithmetic."""
        width, block = x.shape[1], _tile(x.shape[1])
        taken = torch.empty(len(rows.sources), width, dtype=x.dtype, device=x.device)
        grid = (len(taken), ceil_div(width, block))
        launch(kernels.take_rows, grid, x.contiguous(), taken, rows.sources, rows.total, width, K=k, BLOCK=block)
        return taken

    def combine_rows(self, results: Tensor, rows: SortedRows, choice: ExpertChoice) -> Tensor:
        """See Arithmetic."""
        (tokens, k), width, block = choice.experts.shape, results.shape[1], _tile(results.shape[1])
        sums = torch.empty(tokens, width, dtype=results.dtype, device=results.device)
        grid = (tokens, ceil_div(width, block))
        launch(
            kernels.combine_rows, grid, results, choice.weights, rows.places, sums, rows.total, width, K=k, BLOCK=block
        )
        return sums

    def quantize_rows(self, x: Tensor, count: Tensor | None = None) -> Float8Rows:
        """Rows [rows, width] in FP8, and scales float32 [rows, width / BLOCK]. count: how many there are."""
        (rows, width), blocks = x.shape, x.shape[1] // BLOCK
        values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
        tile = min(power_of_2(blocks), TILE // BLOCK)
        if rows:
            launch(
                kernels.quantize_rows, (rows, ceil_div(blocks, tile)), x.contiguous(), values, scales,
                scales if count is None else count, blocks, COUNTED=count is not None, TILE=tile, BLOCK=BLOCK,
            )  # fmt: skip
        return Float8Rows(values, scales)

    def _in_float8(self, x: Tensor, weight: Float8Weight, bias: Tensor | None, grouped: SortedRows | None) -> Tensor:
        """x [rows, in] @ weight.T + bias. grouped: where the rows of experts end, each of which has a weight."""
        rows, experts = len(x), len(weight.values) if grouped else 0
        out = torch.empty(rows, weight.values.shape[-2], dtype=x.dtype, device=x.device)
        tile = FEW_ROWS if rows <= FEW_ROWS.rows * max(1, experts) else FLOAT8_TILES["plain"]
        factors = self.quantize_rows(x, grouped.total if grouped else None)
        multiply("plain", factors, weight, out, tile, bias=bias, grouped=Grouped(grouped, 0) if grouped else None)
        return out


def _gate(gate_up: Tensor, count: Tensor | None) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    activated = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = _tile(width)
        launch(
            kernels.gate, (rows, ceil_div(width, block)), gate_up, activated, gate_up if count is None else count,
            width, COUNTED=count is not None, BLOCK=block,
        )  # fmt: skip
    return activated


def _tile(width: int) -> int:
    """Elements of a row of this width that one program computes."""
    least: int = power_of_2(width)
    return min(TILE, least)
