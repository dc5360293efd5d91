"""Our kernels in Triton beside plain torch, as a part of first_gpu_minutes: how far results differ, and rates."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headrace.engine.device import has_float8_units
from headrace.engine.model.arithmetic import Arithmetic, HeadRules, TorchArithmetic
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
        found, expected = compute(fused).float(), compute(plain).float()
        taken, other = (at.time(lambda of=of, compute=compute: compute(of)) for of in (fused, plain))  # type: ignore[misc]
        gap = float((found - expected).norm() / expected.norm())
        rate = moved / taken / 1e9
        at.keep(f"{name}: differs by {gap:.1e}, {rate:,.0f} GB/s, {other / taken:.1f} times as fast as torch")
    if not has_float8_units(str(at.device)):
        at.keep("products in FP8: this GPU has none")
        return
    for rows in (64, TOKENS, 4 * TOKENS):
        x, weight = torch.randn(rows, HIDDEN, device=at.device).bfloat16(), weight_in_float8(at.device)
        taken, expected = at.time(lambda x=x, weight=weight: fused.linear(x, weight)), weight.expanded()  # type: ignore[misc]
        gap = float((fused.linear(x, weight).float() - x.float() @ expected.T).norm() / (x.float() @ expected.T).norm())
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


def weight_in_float8(device: torch.device) -> Float8Weight:
    """Gate and up of Llama-3.1-8B, in blocks."""
    values = torch.randn(2 * INNER, HIDDEN, device=device).to(torch.float8_e4m3fn)
    return Float8Weight(values, torch.rand(2 * INNER // BLOCK, HIDDEN // BLOCK, device=device) + 0.1, BLOCK)
