"""Layer arithmetic by the kernels of kernels.py: one launch for each operation but products."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from headrace.engine.model.arithmetic import HeadRules, KvSlots, TorchArithmetic
from headrace.engine.model.expert_choice import SMALLEST_SUM, ExpertChoice
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.triton import kernels

TILE = 2048  # elements of a row that one program computes at most, where it need not have all
HEAD_TILE = 2048  # elements of heads that one program turns
PLACES = 1024  # choices whose rows one program places


class TritonArithmetic(TorchArithmetic):
    """Arithmetic for GPUs, with the results of TorchArithmetic up to the order of sums. A kernel is compiled at the
    first call with new widths: all of them by the first forward pass. Rows are contiguous unless something else is
    said."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See Arithmetic. Rows of hidden may be strided."""
        rows, width = hidden.shape
        normed = torch.empty(rows, width, dtype=hidden.dtype, device=hidden.device)
        if rows:
            launch(
                kernels.add_norm, (rows,), hidden, hidden if delta is None else delta, weight, normed, width, eps,
                hidden.stride(0), ADDS=delta is not None, BLOCK=triton.next_power_of_2(width),
                num_warps=8 if width > TILE else 4,
            )  # fmt: skip
        return normed

    def gate(self, gate_up: Tensor) -> Tensor:
        """See Arithmetic."""
        return _gate(gate_up, None)

    def gate_rows(self, gate_up: Tensor, rows: SortedRows) -> Tensor:
        """See Arithmetic."""
        return _gate(gate_up, rows.total)

    def place_heads(self, heads: Tensor, rules: HeadRules, cos: Tensor, sin: Tensor, slots: KvSlots | None) -> None:
        """See Arithmetic."""
        tokens, count, width = heads.shape
        if not tokens:
            return
        half = triton.next_power_of_2(width // 2)
        tile = max(1, min(triton.next_power_of_2(count), HEAD_TILE // (2 * half)))
        normed, nothing = rules.q_norm is not None, heads
        launch(
            kernels.place_heads, (tokens, triton.cdiv(count, tile)), heads, cos, sin,
            rules.q_norm if normed else nothing, rules.k_norm if normed else nothing,
            slots.slots if slots else nothing, slots.first if slots else nothing, rules.eps, slots.step if slots else 0,
            QUERY=rules.query_heads, KV=rules.kv_heads, HALF=width // 2, NORMED=normed, PLACED=slots is not None,
            ROWS=tile, BLOCK=half,
        )  # fmt: skip

    def choose(self, logits: Tensor, moe: MoeSpec, bias: Tensor | None = None) -> ExpertChoice:
        """See Arithmetic. Of equal scores the first."""
        tokens, count = logits.shape
        experts = torch.empty(tokens, moe.top_k, dtype=torch.int64, device=logits.device)
        weights = torch.empty(tokens, moe.top_k, dtype=torch.float32, device=logits.device)
        if tokens:
            launch(
                kernels.choose, (tokens,), logits, logits if bias is None else bias, experts, weights,
                logits.stride(0), moe.scaling, SMALLEST_SUM if moe.scores == "sigmoid" else 0.0,
                EXPERTS=count, K=moe.top_k, GROUPS=moe.groups, TOP_GROUPS=moe.top_groups,
                TWO_BEST=moe.group_score == "two best", SIGMOID=moe.scores == "sigmoid", BIASED=bias is not None,
                NORMALIZED=moe.normalized, ROUNDED=moe.rounded_weights, BLOCK=triton.next_power_of_2(count),
                K_BLOCK=triton.next_power_of_2(moe.top_k), GROUP_BLOCK=triton.next_power_of_2(moe.groups), num_warps=1,
            )  # fmt: skip
        return ExpertChoice(experts, weights)

    def sort_rows(self, experts: Tensor, own: range, counts: Tensor) -> SortedRows:
        """See Arithmetic."""
        ordered, order = experts.flatten().sort(stable=True)
        total = len(order)
        sources, places = (torch.empty(total, dtype=torch.int32, device=order.device) for _ in range(2))
        ends = torch.empty(len(own), dtype=torch.int32, device=order.device)
        launch(
            kernels.place_rows, (triton.cdiv(max(total, len(own)), PLACES),), ordered, order, counts, ends, sources,
            places, total, total.bit_length(), own.start, EXPERTS=len(own), BLOCK=PLACES,
        )  # fmt: skip
        return SortedRows(sources, places, ends)

    def take_rows(self, x: Tensor, rows: SortedRows, k: int) -> Tensor:
        """See Arithmetic."""
        width, block = x.shape[1], _tile(x.shape[1])
        taken = torch.empty(len(rows.sources), width, dtype=x.dtype, device=x.device)
        grid = (len(taken), triton.cdiv(width, block))
        launch(kernels.take_rows, grid, x.contiguous(), taken, rows.sources, rows.total, width, K=k, BLOCK=block)
        return taken

    def combine_rows(self, results: Tensor, rows: SortedRows, choice: ExpertChoice) -> Tensor:
        """See Arithmetic."""
        (tokens, k), width, block = choice.experts.shape, results.shape[1], _tile(results.shape[1])
        sums = torch.empty(tokens, width, dtype=results.dtype, device=results.device)
        grid = (tokens, triton.cdiv(width, block))
        launch(
            kernels.combine_rows, grid, results, choice.weights, rows.places, sums, rows.total, width, K=k, BLOCK=block
        )
        return sums


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Queue a kernel on the current stream of the device of its first argument."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    run: Callable[..., Any] = kernel[grid]
    if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            run(*arguments, **constants)
    else:
        run(*arguments, **constants)


def _gate(gate_up: Tensor, count: Tensor | None) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    activated = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = _tile(width)
        launch(
            kernels.gate, (rows, triton.cdiv(width, block)), gate_up, activated, gate_up if count is None else count,
            width, COUNTED=count is not None, BLOCK=block,
        )  # fmt: skip
    return activated


def _tile(width: int) -> int:
    """Elements of a row of this width that one program computes."""
    return min(TILE, 1 << (width - 1).bit_length())
