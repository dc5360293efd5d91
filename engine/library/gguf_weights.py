"""Weights of GGUF files for modules of transformers: named as these name them, and as they were before llama.cpp's
converter stored them in another form.

Names are those of gguf's own TensorNameMap; what it does not have stands here.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from torch import Tensor

from headrace.core.types.errors import ConfigError, first_of
from headrace.engine.model.checkpoint import GgufTensors
from headrace.engine.model.gguf_config import ARCHITECTURES, ROPE_FACTORS

GATE_UP = "mlp.experts.gate_up_proj"
_ARCHITECTURE = {name: number for number, name in MODEL_ARCH_NAMES.items()}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# In a layer, what gguf names otherwise or does not know: parts of the file by the parameter that they make.
_PARTS = {
    GATE_UP: ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    f"{GATE_UP}_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight",),
    "self_attn.sinks": ("attn_sinks.weight",),
}
# The same, where the first of them is there.
_OTHER = {
    GATE_UP: ("ffn_gate_up_exps.weight",),
    "self_attn.kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
}
GPT_OSS = "gpt-oss"  # its experts are [inputs, outputs], gates and values in turns


class _Made(NamedTuple):
    """How a parameter is made of tensors of the file."""

    parts: tuple[str, ...]
    make: Callable[..., Tensor]


class GgufWeights:
    """Weights of a GGUF file by the names of transformers' parameters, in float32."""

    def __init__(
        self, tensors: GgufTensors, shapes: Mapping[str, tuple[int, ...]], layers: int, heads: tuple[int, int]
    ) -> None:
        """shapes: of all parameters. layers: of the model. heads: of queries and of keys. Raises ConfigError for what
        is missing, left over or misshapen."""
        self._tensors = tensors
        self._architecture = str(tensors.metadata["general.architecture"])
        self._kind = ARCHITECTURES[self._architecture]
        self._map = get_tensor_name_map(_ARCHITECTURE[self._architecture], layers)
        self._heads = {"self_attn.q_proj": heads[0], "self_attn.k_proj": heads[1]}
        self._made = {name: self._how(name) for name in shapes}
        self.names = self._made.keys()
        self._check(shapes, layers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        parts, make = self._made[name]
        return tuple(make(*(torch.empty(self._tensors.shape(part), device="meta") for part in parts)).shape)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter. shape: as shape() says."""
        parts, make = self._made[name]
        return make(*(self._tensors.read(part, self._tensors.shape(part)) for part in parts))

    def _how(self, name: str) -> _Made:
        match = _LAYER.fullmatch(name)
        layer, within = (f"blk.{match[1]}.", match[2]) if match else ("", name)
        for table in (_OTHER, _PARTS):
            parts = tuple(layer + part for part in table.get(within, ()))
            if parts and (table is _PARTS or parts[0] in self._tensors.names):
                return _Made(parts, self._make(within, len(parts)))
        found = self._map.get_name(name, (".weight", ".bias"))
        return _Made((found or name,), self._make(within, 1))

    def _make(self, within: str, parts: int) -> Callable[..., Tensor]:
        """What undoes the converter's changes. within: the name of a parameter in its layer. parts: of the file."""
        if within == "self_attn.kv_b_proj.weight" and parts == 2:
            return _joined_kv
        if within.startswith("mlp.experts."):
            turned = self._architecture == GPT_OSS
            make = _same if parts == 1 else _in_turns if turned else _side_by_side
            return _transposed(make) if turned and not within.endswith("_bias") else make
        if within == "mlp.shared_expert_gate.weight":
            return lambda gate: gate.reshape(1, -1)
        module = within.rpartition(".")[0]
        if self._kind.paired and module in self._heads:
            return lambda rows: _unpaired(rows, self._heads[module])
        if self._kind.raised_norms and within.endswith("norm.weight"):
            return lambda norm: norm - 1
        return _same

    def _check(self, shapes: Mapping[str, tuple[int, ...]], layers: int) -> None:
        used = {part for made in self._made.values() for part in made.parts}
        missing = sorted(used - self._tensors.names)
        unread = sorted(name for name in self._tensors.names - used if not self._may_lie_unread(name, layers))
        for what, names in (("lacks tensors", missing), ("has tensors that the model does not read", unread)):
            if names:
                raise ConfigError(f"{self._tensors.path} {what}: {first_of(names)}")
        for name, shape in shapes.items():
            parts = self._made[name].parts
            try:
                found = self.shape(name)
            except (RuntimeError, IndexError) as error:
                raise ConfigError(f"tensors {', '.join(parts)} do not fit together: {error}") from error
            if found != shape:
                raise ConfigError(
                    f"tensor {', '.join(parts)} should make {name} of shape {list(shape)}, and makes {list(found)}"
                )

    def _may_lie_unread(self, name: str, layers: int) -> bool:
        """What is part of the configuration, and layers behind the last one, which predict further tokens."""
        match = re.match(r"blk\.(\d{1,6})\.", name)
        return name in ROPE_FACTORS or (
            match is not None
            and int(match[1]) >= layers
            and bool(self._tensors.metadata.get(f"{self._architecture}.nextn_predict_layers", 0))
        )


def _same(part: Tensor) -> Tensor:
    return part


def _transposed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *parts: make(*parts).transpose(1, 2)


def _side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """[experts, inner, ...] twice → [experts, 2 x inner, ...], one behind the other."""
    return torch.cat((gate, up), 1)


def _in_turns(gate: Tensor, up: Tensor) -> Tensor:
    """[experts, inner, ...] twice → [experts, 2 x inner, ...], in turns: as gpt-oss has them."""
    return torch.stack((gate, up), 2).flatten(1, 2)


def _joined_kv(keys: Tensor, values: Tensor) -> Tensor:
    """[heads, rank, key width] and [heads, value width, rank] → [heads x (key width + value width), rank]."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (half, 2) to halves (2, half)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
