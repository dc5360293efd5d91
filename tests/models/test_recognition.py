"""Which of transformers' modules our kernels compute in one step: those that give the same, and no others."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from headrace.engine.library.recognition import is_gated_mlp, is_silu_gate, norm_weight

WIDTH, INNER = 48, 80
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "mlp_bias": False, "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


class Changed(LlamaRMSNorm):
    """A norm that is another function in one way."""

    def __init__(self, change: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        super().__init__(WIDTH)
        self.change = change

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.change(hidden_states, self.weight, self.variance_epsilon)


class Limited(LlamaMLP):
    """A gate that is cut at 7, as that of some models is."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=7.0)
        found: Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return found


def random(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** (0.5 if parameter.dim() > 1 else 0)
        parameter.requires_grad_(False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_are_ours(dtype: torch.dtype) -> None:
    plain, one_more = (random(each).to(dtype) for each in (LlamaRMSNorm(WIDTH), Gemma3RMSNorm(WIDTH)))
    weight = norm_weight(plain)
    assert weight is not None
    assert torch.equal(weight, plain.weight)
    weight = norm_weight(one_more)
    if dtype == torch.bfloat16:
        assert weight is None, "1 + weight would be rounded"
    else:
        assert weight is not None
        assert torch.equal(weight, one_more.weight + 1)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(WIDTH),
        MambaRMSNormGated(WIDTH, WIDTH),
        Changed(lambda x, weight, eps: rms(x, eps) * weight + x),
        Changed(lambda x, weight, eps: rms(x, 0.0) * weight),
        Changed(lambda x, weight, eps: weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps)),
        Changed(lambda x, weight, eps: rms(x.view(*x.shape[:-1], 2, -1), eps).flatten(-2) * weight),
        Changed(lambda x, weight, eps: rms(x, eps).clamp(-2, 2) * weight),
        nn.Identity(),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_that_are_not(norm: nn.Module) -> None:
    assert norm_weight(random(norm)) is None


def test_gated_mlps() -> None:
    config = SimpleNamespace(**CONFIG)
    assert is_gated_mlp(random(LlamaMLP(config)))
    assert not is_gated_mlp(random(Limited(config)))
    assert not is_gated_mlp(random(Gemma3MLP(config)))
    assert not is_gated_mlp(random(LlamaMLP(SimpleNamespace(**{**CONFIG, "mlp_bias": True}))))
    assert not is_gated_mlp(nn.Linear(WIDTH, WIDTH))


def test_gates_of_experts() -> None:
    def interleaved(x: Tensor) -> Tensor:
        return F.silu(x[..., ::2]) * x[..., 1::2]

    def swapped(x: Tensor) -> Tensor:
        up, gate = x.chunk(2, -1)
        return F.silu(gate) * up

    fields = {"num_experts": 2, "moe_intermediate_size": INNER, "hidden_size": WIDTH, "hidden_act": "silu"}
    experts = Qwen2MoeExperts(SimpleNamespace(**fields, _experts_implementation="eager"))
    assert is_silu_gate(experts._apply_gate, INNER)
    assert not is_silu_gate(interleaved, INNER)
    assert not is_silu_gate(swapped, INNER)
