"""Which of transformers' modules are RMSNorm, SwiGLU gates and gated MLPs: recognised by what they compute.

A module is taken for one of these when it gives for random rows, small and large ones, what our torch reference gives,
whatever it is called; else it stays as it is.
"""

from collections.abc import Callable
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.model.arithmetic import gate, rms_norm

SCALES = (1e-3, 1.0, 30.0, 1000.0)  # of random rows: small ones show epsilons, large ones show limits
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # as a share of the largest number
EPSILONS = ("variance_epsilon", "eps", "epsilon")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is down(silu(gate(x)) * up(x))."""
    parts = [getattr(module, name, None) for name in MLP_PARTS]
    if not all(type(part) is nn.Linear and part.bias is None for part in parts):
        return False
    first, second, last = (part.weight.detach() for part in parts if isinstance(part, nn.Linear))

    def expected(x: Tensor) -> Tensor:
        return F.linear(gate(torch.cat([F.linear(x, first), F.linear(x, second)], dim=-1)), last)

    return _same(module, expected, first)


def norm_weight(module: nn.Module) -> Tensor | None:
    """The weight with which a module is RMSNorm; None where it is not."""
    weight, eps = getattr(module, "weight", None), epsilon_of(module)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None or len(list(module.parameters())) > 1:
        return None
    if len(signature(module.forward).parameters) > 1:  # it can be given a gate
        return None
    if _same(module, lambda x: rms_norm(x, weight, eps), weight):
        return weight.detach()
    # In 16 bits the sum would be rounded, which the module does not do.
    if weight.dtype == torch.float32 and _same(module, lambda x: rms_norm(x, weight + 1, eps), weight):
        return weight.detach() + 1
    return None


def is_silu_gate(function: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether a function of [rows, 2 * width] is gate()."""
    x = _rows(2 * width, torch.float32)
    return _close(function(x), gate(x))


def epsilon_of(module: nn.Module) -> float | None:
    """What a norm adds to the mean square; None for a module that names none."""
    return next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)


def _same(module: nn.Module, expected: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    x = _rows(weight.shape[-1], weight.dtype).to(weight.device)
    try:
        return _close(module(x), expected(x))
    except (TypeError, AttributeError, RuntimeError, ValueError):  # it takes something else
        return False


def _rows(width: int, dtype: torch.dtype) -> Tensor:
    rows = torch.randn(len(SCALES), width, generator=torch.Generator().manual_seed(1))
    return (rows * torch.tensor(SCALES)[:, None]).to(dtype)


def _close(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    gaps, sizes = ((each.float()).abs().amax(1) for each in (found - expected, expected))
    return bool((gaps <= CLOSE[expected.dtype] * sizes).all())
