"""Modules of transformers that our arithmetic computes: nn.Linear, experts, gated MLPs, RMSNorm, products of routers;
and what adapters add to them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.layers.lora import Groups, add_deltas
from headrace.engine.layers.moe import rows_by_expert
from headrace.engine.library.recognition import MLP_PARTS, epsilon_of, is_gated_mlp, is_silu_gate, norm_weight
from headrace.engine.library.shards import part_of
from headrace.engine.model.arithmetic import Arithmetic, Weight
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.weights import Deltas

ROUTERS = ("gate", "router", "shared_expert_gate")
EXPONENTIAL = {F.silu, F.gelu, F.softplus, F.mish, F.elu, F.logsigmoid, torch.sigmoid, Tensor.sigmoid}
THREAD_ELEMENTS = 32768  # torch gives a thread no fewer, and all of them as many, rounded up
VECTOR_ELEMENTS = 64  # that torch computes at once: two vectors of AVX-512, of 16 bits each
Pack = Callable[[Tensor], Weight]
"""Rounds, quantises and packs a weight [out, in]."""


class Adaptable(nn.Module):
    """Outputs of a product, as nn.Linear has them, to which adapters may add."""

    def __init__(self, of: nn.Linear, first: int = 0) -> None:
        """first: of its outputs among those of the product."""
        super().__init__()
        self.in_features, self.out_features = of.in_features, of.out_features
        self.part = part_of(of)
        """What this shard has of the weight; None for all of it."""
        self._first = first
        self._deltas: Deltas = {}
        self._rows = AdaptedRows()

    def adapt(self, deltas: Deltas, rows: "AdaptedRows") -> None:
        """Have adapters add to it. rows: of the pass that is under way."""
        self._rows = rows
        self._deltas = {name: [each.moved(self._first) for each in parts] for name, parts in deltas.items()}

    @property
    def whole_size(self) -> tuple[int, int]:
        """Of the weight of all shards together: [out, in]."""
        sizes = [self.out_features, self.in_features]
        if self.part is not None:
            sizes[self.part.axis] = self.part.whole
        return sizes[0], sizes[1]

    @property
    def adapted(self) -> bool:
        """Whether adapters add to it in the pass under way."""
        return any(adapter in self._deltas for adapter, _ in self._rows.groups)

    def add(self, arithmetic: Arithmetic, x: Tensor, y: Tensor) -> None:
        """Add to y [rows, outputs of the product] what adapters make of x [rows, in]. Raises ValueError where adapters'
        rows are not those of the pass."""
        if not self.adapted:
            return
        if len(x) != self._rows.tokens:
            raise ValueError("an adapted module computes other rows than the pass has tokens")
        add_deltas(arithmetic, x, y, self._deltas, self._rows.groups)


class PackedLinear(Adaptable):
    """nn.Linear by an Arithmetic. Some models read its weight's dtype: an empty tensor has it."""

    def __init__(
        self, of: nn.Linear, arithmetic: Arithmetic, pack: Pack, compute: torch.dtype, tp: Collectives = ALONE
    ) -> None:
        """tp: the shards, over which the results are summed of a module that is divided along its inputs."""
        super().__init__(of)
        self._arithmetic = arithmetic
        self._packed = pack(of.weight.detach())
        self.weight = torch.empty(0, dtype=compute)
        self._tp = tp if self.part is not None and self.part.axis == 1 else ALONE
        bias = of.bias if self._tp.rank == 0 else None  # added once
        self.bias = None if bias is None else bias.detach().to(compute)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]. Raises ValueError, see add()."""
        flat = x.reshape(-1, self.in_features).contiguous()
        y = self._arithmetic.linear(flat, self._packed, self.bias)
        self.add(self._arithmetic, flat, y)
        y = self._tp.all_reduce(y).wait()
        return y.view(*x.shape[:-1], self.out_features)


class AdaptedRows:
    """Which rows of the pass under way go through adapters."""

    def __init__(self) -> None:
        self.groups: Groups = ()
        self.tokens = 0
        """Rows of the pass."""

    @contextmanager
    def during(self, groups: Groups, tokens: int) -> Iterator[None]:
        """A pass of so many rows is under way."""
        self.groups, self.tokens = groups, tokens
        try:
            yield
        finally:
            self.groups = ()


class FusedNorm(nn.Module):
    """RMSNorm by an Arithmetic."""

    def __init__(self, weight: Tensor, eps: float, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps
        self._arithmetic = arithmetic

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] → the same."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self._arithmetic.add_norm(flat, None, self.weight, self.variance_epsilon).view(x.shape)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(
        self, of: nn.Module, arithmetic: Arithmetic, pack: Pack, compute: torch.dtype, tp: Collectives = ALONE
    ) -> None:
        """of: as is_gated_mlp() says. tp: see PackedLinear."""
        super().__init__()
        gate, up, down = (of.get_submodule(name) for name in MLP_PARTS)
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        self._arithmetic = arithmetic
        self._gate_up = pack(torch.cat([gate.weight.detach(), up.weight.detach()]))
        self.gate_proj, self.up_proj = Adaptable(gate), Adaptable(up, gate.out_features)
        self.down_proj = PackedLinear(down, arithmetic, pack, compute, tp)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden size] → the same. Raises ValueError, see Adaptable.add()."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if self.gate_proj.adapted or self.up_proj.adapted:
            both = self._arithmetic.linear(flat, self._gate_up)
            for part in (self.gate_proj, self.up_proj):
                part.add(self._arithmetic, flat, both)
            inner = self._arithmetic.gate(both)
        else:
            inner = self._arithmetic.gated_linear(flat, self._gate_up)
        found: Tensor = self.down_proj(inner)
        return found.view(x.shape)


class OutputHead(nn.Module):
    """The output head: float32 logits by an Arithmetic. Its weight may be the embedding's."""

    def __init__(self, of: nn.Linear, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic
        self.weight, self.bias = of.weight, of.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden size] → [..., vocabulary]."""
        logits = self._arithmetic.logits(x.reshape(-1, x.shape[-1]).contiguous(), self.weight)
        logits = logits if self.bias is None else logits + self.bias.float()
        return logits.view(*x.shape[:-1], -1)


class PackedExperts:
    """The experts of a module that has them in joined tensors, as transformers' interface of experts says."""

    def __init__(
        self, module: Any, arithmetic: Arithmetic, pack: Pack, compute: torch.dtype, tp: Collectives = ALONE
    ) -> None:
        """Take the weights of a module, which has none afterwards. tp: the shards, among which its experts are
        divided."""
        part = part_of(module)
        self._first = part.own.start if part is not None else 0
        self._tp = tp if part is not None else ALONE
        self._module = module
        self._arithmetic = arithmetic
        name = "gate_up_proj" if module.has_gate else "up_proj"
        up, down = getattr(module, name).detach(), module.down_proj.detach()
        if module.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        self._up = [pack(each) for each in up]
        self._down = [pack(each) for each in down]
        self._gated = bool(module.has_gate and not module.has_bias and is_silu_gate(module._apply_gate, up.shape[1]))
        self._up_bias = getattr(module, f"{name}_bias").detach().to(compute) if module.has_bias else None
        self._down_bias = module.down_proj_bias.detach().to(compute) if module.has_bias else None
        for each in (name, "down_proj"):
            delattr(module, each)

    def compute(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums over the chosen experts, added in ascending order of experts, in float32 and rounded once.

        x: [tokens, hidden size]. chosen, weights: [tokens, k].
        """
        module, arithmetic = self._module, self._arithmetic
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        edges = torch.arange(self._first, self._first + len(self._up) + 1, device=chosen.device)
        tokens, factors, bounds = rows_by_expert(ExpertChoice(chosen, weights.float()), edges)
        for expert, (start, stop) in enumerate(pairwise(bounds.tolist())):
            if start == stop:
                continue
            rows = tokens[start:stop]
            if self._gated:
                inner = arithmetic.gated_linear(x[rows], self._up[expert])
            else:
                bias = None if self._up_bias is None else self._up_bias[expert]
                inner = arithmetic.linear(x[rows], self._up[expert], bias)
                inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            bias = None if self._down_bias is None else self._down_bias[expert]
            result = arithmetic.linear(inner.contiguous(), self._down[expert], bias)
            if module.has_post_expert_norm:
                result = module.post_expert_norm(result)
            sums.index_add_(0, rows, result.float() * factors[start:stop])
        return self._tp.all_reduce(sums).wait().to(x.dtype)


class Products(TorchFunctionMode):
    """What modules call torch for with other bits for other numbers of tokens: F.linear, by routers, is computed by an
    Arithmetic, and exponential functions element by element alike."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every one of its functions."""
        if func is F.linear and not kwargs and args[0].dtype == args[1].dtype:
            x, weight, bias = (*args, None)[:3]
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            return self._arithmetic.linear(flat, weight.contiguous(), bias).view(*x.shape[:-1], len(weight))
        if func in EXPONENTIAL and args and args[0].is_floating_point() and args[0].device.type == "cpu":
            return _in_whole_vectors(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _in_whole_vectors(func: Callable[..., Tensor], x: Tensor, *args: Any, **named: Any) -> Tensor:
    """An elementwise function, with zeros behind x where its elements do not fill the vectors of all threads: torch
    computes what is left over by scalar instructions, whose results differ in the last bit."""
    count = x.numel()
    threads = max(1, min(torch.get_num_threads(), ceil_div(count, THREAD_ELEMENTS)))
    size = ceil_div(count, threads * VECTOR_ELEMENTS) * threads * VECTOR_ELEMENTS
    if size == count and x.is_contiguous():
        return func(x, *args, **named)
    padded = x.new_zeros(size)
    padded[:count] = x.reshape(-1)
    return func(padded, *args, **named)[:count].view(x.shape)


def replace_products(
    model: nn.Module,
    arithmetic: Arithmetic,
    pack: Pack,
    compute: torch.dtype,
    *,
    unpacked: Pack,
    leave: Collection[str],
    tp: Collectives,
) -> None:
    """Have our arithmetic compute the products of all nn.Linear, gated MLPs and experts below a module.

    unpacked: in place of pack for those that choose experts, which are never in 8 bits. leave: names of those whose
    weights others multiply with. tp: the shards of the stage.
    """
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear:
            if name not in leave:
                chosen = unpacked if name in ROUTERS else pack
                setattr(model, name, PackedLinear(child, arithmetic, chosen, compute, tp))
            continue
        if is_gated_mlp(child):
            setattr(model, name, GatedMlp(child, arithmetic, pack, compute, tp))
            continue
        replace_products(child, arithmetic, pack, compute, unpacked=unpacked, leave=leave, tp=tp)
        if hasattr(child, "is_transposed") and isinstance(getattr(child, "down_proj", None), nn.Parameter):
            packed = PackedExperts(child, arithmetic, pack, compute, tp)
            object.__setattr__(child, "packed", packed)


def fuse_norms(model: nn.Module, arithmetic: Arithmetic) -> None:
    """Replace all modules below one that are RMSNorm."""
    for name, child in list(model.named_children()):
        eps = epsilon_of(child)
        if eps is not None and (weight := norm_weight(child)) is not None:
            setattr(model, name, FusedNorm(weight, eps, arithmetic))
        else:
            fuse_norms(child, arithmetic)


def widen(model: nn.Module, held: torch.dtype, compute: torch.dtype) -> None:
    """Bring what is left of a model's weights to the dtype of computation: norms and other vectors. Embeddings stay as
    they are held, and what they give is widened. Where computation is in 16 bits, what transformers keeps in float32
    stays so."""
    tables = [each for each in model.modules() if type(each) is nn.Embedding]
    of_tables = {id(each.weight) for each in tables}
    for each in tables:
        each.weight.data = each.weight.data.to(held)
        if held != compute:
            each.register_forward_hook(lambda _, __, found: found.to(compute))
    for parameter in model.parameters():
        if id(parameter) not in of_tables and parameter.is_floating_point() and compute == torch.float32:
            parameter.data = parameter.data.to(compute)
