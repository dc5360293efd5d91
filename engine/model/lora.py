"""LoRA adapters (arXiv 2106.09685) in peft's format: adapter_config.json and adapter_model.safetensors.

What of the format would change results and is not computed is refused with its key. Which modules an adapter changes
is said by the names of its tensors, as peft writes them: base_model.model.<module>.lora_A.weight and ….lora_B.weight.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from headrace.core.types.errors import ConfigError, shown
from headrace.core.types.requests.adapters import adapter_folders
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.config_fields import FLAG, NAME, OBJECT, POSITIVE, SIZE, Fields
from headrace.engine.model.sharding import RankPart
from headrace.engine.model.source import read_json
from headrace.engine.model.tensor_names import FLOATS, model_tensors

if TYPE_CHECKING:
    from torch import Tensor  # the front end plans memory without loading torch

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FINGERPRINT_CHARS = 32
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_NATIVE = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_OTHER_KIND = re.compile(r"lora_[A-Za-z_]+(\.bias)?")
# Of adapter_config.json: read below, or without effect on what is computed with trained weights.
_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "init_lora_weights", "bias"}
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_INITS = ("gaussian", "eva", "orthogonal", "mica")  # others have changed the model's own weights


class LoraModule(NamedTuple):
    """What an adapter adds to one linear layer: x @ a.T @ b.T * scaling."""

    rank: int
    inputs: int
    outputs: int
    scaling: float


class LoraAdapter:
    """An adapter's files: what they change, and the weights on demand; safe for several threads."""

    def __init__(self, name: str, folder: Path) -> None:
        """Read the configuration and the header of the weights. name: as requests name it. Raises ConfigError for what
        cannot be read or is not supported."""
        self.name = name
        self._where = f"--lora {name}"
        if not folder.is_dir():
            raise ConfigError(f"{self._where}: {folder} is no folder")
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise ConfigError(f"{self._where}: {folder} has no {file}")
        scaling = _Scaling(self._where, read_json(folder / CONFIG))
        self._path = folder / WEIGHTS
        try:
            self._header: Any = safe_open(self._path, framework="numpy")
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{self._where}: {self._path} cannot be read as safetensors: {error}") from error
        shapes = self._shapes()
        self.modules: Mapping[str, LoraModule] = {
            module: self._module(module, both, scaling) for module, both in shapes.items()
        }
        """By name, as transformers names them: model.layers.0.self_attn.q_proj."""
        self.fingerprint: str = self._fingerprint()
        """Hash of the weights and of how they are scaled, hex."""

    def read(self, module: str, outputs: range | None = None, inputs: range | None = None) -> "tuple[Tensor, Tensor]":
        """a [rank, inputs] as it is stored, and b [outputs, rank] in float32, multiplied by the scaling; only these
        outputs and inputs of the layer."""
        file: Any = safe_open(self._path, framework="pt", device="cpu")
        a, b = (file.get_slice(_tensor_name(module, part)) for part in "AB")
        of_b = b[:] if outputs is None else b[outputs.start : outputs.stop]
        of_a = a[:] if inputs is None else a[:, inputs.start : inputs.stop]
        return of_a, of_b.float() * self.modules[module].scaling

    def refuse(self, module: str, reason: str) -> ConfigError:
        """The error of a module that cannot be adapted."""
        return ConfigError(f"{self._where}: {shown(module)} {reason}")

    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in sorted(self._header.keys()):
            parts = _TENSOR.fullmatch(name)
            if parts is None:
                other = _OTHER_KIND.search(name)
                what = f"{other[0]} is not supported" if other else "only lora_A and lora_B of linear layers are"
                raise ConfigError(f"{self._where}: tensor {shown(name)!r} in {WEIGHTS}: {what}")
            stored = self._header.get_slice(name)
            if stored.get_dtype() not in FLOATS:
                raise ConfigError(f"{self._where}: tensor {shown(name)!r} is stored as {stored.get_dtype()}")
            found.setdefault(parts[1], {})[parts[2]] = tuple(stored.get_shape())
        if not found:
            raise ConfigError(f"{self._where}: {self._path} has no tensors")
        return found

    def _module(self, module: str, shapes: Mapping[str, tuple[int, ...]], scaling: "_Scaling") -> LoraModule:
        if shapes.keys() != {"A", "B"}:
            raise self.refuse(module, f"has no lora_{'B' if 'A' in shapes else 'A'} in {WEIGHTS}")
        a, b = shapes["A"], shapes["B"]
        rank = scaling.rank(module)
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank or not a[1] or not b[0]:
            raise self.refuse(
                module,
                f"has lora_A {list(a)} and lora_B {list(b)}; of rank {rank} they are [{rank}, in], [out, {rank}]",
            )
        return LoraModule(rank, a[1], b[0], scaling.factor(module, rank))

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(msgspec.msgpack.encode(sorted((name, *each) for name, each in self.modules.items())))
        try:
            with self._path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{self._where}: {self._path} cannot be read: {error}") from error
        return digest.hexdigest()[:FINGERPRINT_CHARS]


class _Scaling:
    """What adapter_config.json says of ranks and scaling."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        """Raises ConfigError for keys that are not supported."""
        fields = Fields(f"{where}: {CONFIG}", values)
        if (kind := fields.get("peft_type", NAME)) != "LORA":
            raise ConfigError(f"{where}: {CONFIG}: 'peft_type' is {kind}; supported is LORA")
        for key, value in values.items():
            if value and key not in _READ | _WITHOUT_EFFECT:
                raise ConfigError(f"{where}: {CONFIG}: {shown(key)!r} is not supported")
        if (bias := fields.get("bias", NAME, "none")) != "none":
            raise ConfigError(f"{where}: {CONFIG}: 'bias' is {bias}; supported is none")
        init = values.get("init_lora_weights")
        if isinstance(init, str) and init.lower() not in _INITS:
            raise ConfigError(
                f"{where}: {CONFIG}: 'init_lora_weights' is {shown(init)!r}, which changes the model's own weights; "
                "save the adapter as one for the unchanged model"
            )
        self._rank, self._alpha = fields.get("r", SIZE), fields.get("lora_alpha", POSITIVE)
        self._root = fields.get("use_rslora", FLAG, False)
        self._ranks = _patterns(fields, "rank_pattern", SIZE, where)
        self._alphas = _patterns(fields, "alpha_pattern", POSITIVE, where)

    def rank(self, module: str) -> int:
        """Of a module's two matrices."""
        return int(_matching(self._ranks, module, self._rank))

    def factor(self, module: str, rank: int) -> float:
        """alpha / rank, or alpha / √rank (arXiv 2312.03732)."""
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._root else rank)


def open_adapters(given: Sequence[str]) -> tuple[LoraAdapter, ...]:
    """The adapters of --lora NAME=FOLDER, in order. Raises ConfigError."""
    return tuple(LoraAdapter(name, Path(folder).expanduser()) for name, folder in adapter_folders(given).items())


def check_native(adapters: Sequence[LoraAdapter], spec: ModelSpec) -> None:
    """Raises ConfigError for a module that our own layers do not adapt, or that has other sizes in the model."""
    tensors = model_tensors(spec)
    for adapter in adapters:
        for name, module in adapter.modules.items():
            found = tensors.get(f"{name}.weight")
            if found is None:
                raise adapter.refuse(name, "is no linear layer of the model")
            if not _NATIVE.fullmatch(name) or (spec.mla is not None and ".self_attn." in name):
                raise adapter.refuse(
                    name,
                    "is not adapted by our own layers; they do so with q_proj, k_proj, v_proj and o_proj of grouped "
                    "attention, and gate_proj, up_proj and down_proj of MLPs without experts",
                )
            check_sizes(adapter, name, module, found)


def check_sizes(adapter: LoraAdapter, name: str, module: LoraModule, sizes: tuple[int, ...]) -> None:
    """Raises ConfigError for a module that has other sizes in the model, [out, in]."""
    if sizes != (module.outputs, module.inputs):
        found = f"{[module.outputs, module.inputs]} in the adapter"
        raise adapter.refuse(name, f"is {list(sizes)} in the model and {found}: it is of another model")


def distinct(adapters: Sequence[LoraAdapter]) -> list[LoraAdapter]:
    """Those that differ: the first of each fingerprint."""
    return list({adapter.fingerprint: adapter for adapter in reversed(adapters)}.values())


def delta_count(part: RankPart, adapters: Sequence[LoraAdapter]) -> int:
    """Number of adapters' weights that a rank holds."""
    spec, shard, total = part.spec, part.shard, 0
    own = {"q": len(shard.heads), "o": len(shard.heads), "k": len(shard.kv_heads), "v": len(shard.kv_heads)}
    parts = {f"{name}_proj": heads * spec.head_dim for name, heads in own.items()}
    parts |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), len(shard.columns))
    for adapter in distinct(adapters):
        for name, module in adapter.modules.items():
            layer = layer_of(name)
            if layer is not None and layer not in part.layers:
                continue
            inputs, outputs, kind = module.inputs, module.outputs, name.rpartition(".")[2]
            if spec.library is None and kind in ("o_proj", "down_proj"):
                inputs = parts[kind]
            elif spec.library is None:
                outputs = parts[kind]
            total += module.rank * (inputs + outputs)
    return total


def layer_of(module: str) -> int | None:
    """The layer that a module is in, counted from the model's first; None for one outside the layers."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def _patterns(fields: Fields, key: str, kind: Any, where: str) -> list[tuple[re.Pattern[str], float]]:
    """Values by the modules' names that they are for, in the order in which peft tries them."""
    within, found = fields.within(key), []
    for pattern in fields.get(key, OBJECT, {}):
        try:
            found.append((re.compile(rf"(.*\.)?({pattern})$"), within.get(pattern, kind)))
        except re.error as error:
            raise ConfigError(f"{where}: {CONFIG}: '{key}' has {shown(pattern)!r}, no regular expression") from error
    return found


def _matching(patterns: Sequence[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _tensor_name(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"
