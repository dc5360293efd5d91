"""Our kernels in Triton beside plain torch, as a part of first_gpu_minutes: how far results differ, and rates."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headrace.engine.device import has_float8_units
from headrace.engine.device_report import fastest_seconds
from headrace.engine.model.arithmetic import Arithmetic, HeadRules, KvSlots, Normed, Stream, TorchArithmetic
from headrace.engine.model.float8 import BLOCK, Float8Weight
from headrace.engine.model.moe_spec import MoeSpec

if TYPE_CHECKING:
    from benchmarks.first_gpu_minutes import Minutes

TOKENS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 2048, 4096, 14336, 32, 8, 128
MOE = MoeSpec(experts=128, top_k=8, intermediate_size=768, layer_kinds=("moe",), normalized=True)


class Operation(NamedTuple):
    """One of a layer."""

    compute: Callable[[Arithmetic], Tensor]
    moved: int
    """Bytes that it has to read and write."""


def own_kernels(at: "Minutes") -> None:
    """Each kernel beside torch's operators; products in FP8 beside those in bfloat16."""
    if not at.on_gpu or find_spec("triton") is None:
        at.keep("kernels in Triton: need a GPU, and Triton")
        return
    from headrace.engine.triton.arithmetic import TritonArithmetic

    fused, plain = TritonArithmetic(), TorchArithmetic()
    for name, (compute, moved) in operations(at.device).items():
        taken, other = (at.time(lambda of=of, compute=compute: compute(of)) for of in (fused, plain))  # type: ignore[misc]
        gap, rate = gap_of(compute(fused), compute(plain)), moved / taken / 1e9
        at.keep(f"{name}: differs by {gap:.1e}, {rate:,.0f} GB/s, {other / taken:.1f} times as fast as torch")
    products(at)
    if not has_float8_units(str(at.device)):
        at.keep("products in FP8: this GPU has none")
        return
    for rows in (64, TOKENS, 4 * TOKENS):
        x, weight = torch.randn(rows, HIDDEN, device=at.device).bfloat16(), weight_in_float8(at.device)
        taken, expected = at.time(lambda x=x, weight=weight: fused.linear(x, weight)), weight.expanded()  # type: ignore[misc]
        gap = gap_of(fused.linear(x, weight), x.float() @ expected.T)
        at.keep(f"{rows:,} rows in FP8: {at.share(2 * rows * expected.numel(), taken)}, differs by {gap:.1e}")


def operations(device: torch.device) -> dict[str, Operation]:
    """At the widths of Llama-3.1-8B, and the router of Qwen3-30B-A3B."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    hidden, delta, weight, gate_up = (
        random(TOKENS, HIDDEN),
        random(TOKENS, HIDDEN),
        random(HIDDEN),
        random(TOKENS, 2 * INNER),
    )
    heads, norm = random(TOKENS, HEADS + 2 * KV_HEADS, WIDTH), random(WIDTH)
    angles = torch.rand(TOKENS, 1, WIDTH // 2, device=device)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    logits = torch.randn(TOKENS, MOE.experts, device=device)

    def placed(of: Arithmetic) -> Tensor:
        turned = heads.clone()
        of.place_heads(turned, HeadRules(HEADS, KV_HEADS, norm, norm, 1e-6), cos, sin, None)
        return turned

    return {
        "norm and residual": Operation(lambda of: of.add_norm(hidden.clone(), delta, weight, 1e-5), 6 * hidden.nbytes),
        "activation": Operation(lambda of: of.gate(gate_up), gate_up.nbytes * 3 // 2),
        "norm and rotation of heads": Operation(placed, 4 * heads.nbytes),
        "choice of experts": Operation(lambda of: of.choose(logits, MOE).weights, logits.nbytes),
    }


def products(at: "Minutes") -> None:
    """Each product that does what surrounds it, beside torch's with the kernels around it."""
    from headrace.engine.triton.arithmetic import TritonArithmetic
    from headrace.engine.triton.products import OwnProducts

    ours, torchs = (TritonArithmetic(OwnProducts(dense=True, least_rows=least)) for least in (0, sys.maxsize))
    for rows in (4 * TOKENS, TOKENS, TOKENS // 4, TOKENS // 32):
        hidden = torch.randn(rows, HIDDEN, device=at.device).bfloat16()
        for name, compute in product_steps(torchs, hidden).items():
            gap = gap_of(*(compute(of, hidden.clone()) for of in (ours, torchs)))
            own, other = (fastest_seconds(at.device, partial(compute, of, hidden)) for of in (ours, torchs))
            at.keep(
                f"product {name} of {rows:,} rows {own * 1e3:.3f} ms, torch's {other * 1e3:.3f}; differs by {gap:.1e}"
            )


def product_steps(arithmetic: Arithmetic, hidden: Tensor) -> dict[str, Callable[[Arithmetic, Tensor], Tensor]]:
    """Products with what surrounds them, of Llama-3.1-8B and of Qwen3-30B-A3B's experts, with the residual stream.
    Each that takes that norms it, so that torch's has the norm's kernel. arithmetic: sorts rows of experts."""
    rows, device = len(hidden), hidden.device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16() / 8

    qkv, output = random((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN), random(HIDDEN, HEADS * WIDTH)
    gate_up, down, norm = random(2 * INNER, HIDDEN), random(HIDDEN, INNER), random(HIDDEN)
    experts = random(MOE.experts, 2 * MOE.intermediate_size, HIDDEN // 2)
    inner, attended = random(rows, INNER), random(rows, HEADS * WIDTH)
    normed = Normed(Stream(hidden, hidden.float().square().sum(1, keepdim=True)), norm, 1e-5)
    turns = torch.rand(rows, 1, WIDTH, device=device)
    slots = KvSlots(random(2 * KV_HEADS * rows, WIDTH), torch.arange(rows, device=device), rows, lambda _: None)
    rules = HeadRules(HEADS, KV_HEADS)
    taken = random(rows, HIDDEN // 2)
    chosen = arithmetic.choose(torch.randn(rows, MOE.experts, device=device), MOE).experts
    counts = torch.zeros(MOE.experts, dtype=torch.int64, device=device)
    sorted_rows = arithmetic.sort_rows(chosen, range(MOE.experts), counts)
    return {
        f"{HIDDEN} x {HEADS * WIDTH} added": lambda of, stream: added(of, stream, attended, output),
        f"{len(qkv)} x {HIDDEN} normed heads": lambda of, _: of.head_linear(
            normed, qkv, None, rules, turns, turns, slots
        )[:, :HEADS],
        f"{2 * INNER} x {HIDDEN} normed gated": lambda of, _: of.gated_linear(normed, gate_up),
        f"{HIDDEN} x {INNER} added": lambda of, stream: added(of, stream, inner, down),
        f"{MOE.experts} experts' {experts.shape[1]} x {HIDDEN // 2} gated": lambda of, _: of.gated_experts(
            taken, experts, sorted_rows, MOE.top_k
        ),
    }


def added(of: Arithmetic, stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The residual stream with a product."""
    delta = of.linear_to(stream, x, weight)
    return stream.add_(delta) if isinstance(delta, Tensor) else stream


def gap_of(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, as a share of what was expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def weight_in_float8(device: torch.device) -> Float8Weight:
    """Gate and up of Llama-3.1-8B, in blocks."""
    values = torch.randn(2 * INNER, HIDDEN, device=device).to(torch.float8_e4m3fn)
    return Float8Weight(values, torch.rand(2 * INNER // BLOCK, HIDDEN // BLOCK, device=device) + 0.1, BLOCK)
