"""Building a model of transformers' modules: on the meta device to look at it, or with the weights of a stage's layers.

Never by code of a repository. Weights that are missing, left over or misshapen are errors.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from headrace.core.runtime.progress import LoadProgress
from headrace.core.types.errors import ConfigError, first_of
from headrace.engine.library.cache import RowsCache
from headrace.engine.library.gguf_weights import GgufWeights
from headrace.engine.library.hooks import NAME, register
from headrace.engine.library.images import image_terms
from headrace.engine.library.shards import OTHER_INPUTS, Cut, cuts_of, plan_of, shrink, stored_cuts
from headrace.engine.model.checkpoint import GgufTensors, NamedTensors, SafetensorsCheckpoint
from headrace.engine.model.gguf_config import config_from_gguf
from headrace.engine.model.sharding import Shard
from headrace.engine.model.source import ModelSource

VERSION = "5.23"  # of transformers, whose hooks this package relies on; another one is tried with its own tests
LENGTH_ROPES = {"dynamic", "longrope"}
LOADERS = 4  # threads that read weights
LAYER_LISTS = ("layers", "h", "blocks")
CACHE_NAMES = ("past_key_values", "cache_params")


class LayersDone(Exception):
    """The layers of a stage have run: the rest of the model belongs to the stages after it."""


class ModelPart(NamedTuple):
    """What a rank has of a model: some of its layers, and of each parameter what its shard has."""

    layers: range
    total: int
    """Layers of the whole model."""
    shard: int = 0
    shards: int = 1
    text_only: bool = False
    """Encoders of other inputs are left out."""

    @property
    def whole(self) -> bool:
        """It is all of the model."""
        return len(self.layers) == self.total and self.shards == 1 and not self.text_only


class OtherLayer(nn.Module):
    """In place of a layer of another stage.

    The one before a stage's first gives what came from the stage before, so that what a model does around its layers
    (scaled embeddings) is not done twice; the one behind its last ends the pass.
    """

    def __init__(self, place: str) -> None:
        """place: "before", "behind", or "" for any other."""
        super().__init__()
        self.place = place
        self.given: Tensor | None = None
        self.taken: Tensor | None = None

    def forward(self, hidden: Tensor | None = None, *_: Any, **named: Any) -> Tensor | None:
        """Pass hidden states on."""
        hidden = named.get("hidden_states", hidden)
        if self.place == "behind":
            self.taken = hidden
            raise LayersDone
        return self.given if self.place == "before" and self.given is not None else hidden

    def __getattr__(self, name: str) -> Any:
        if name == "attention_type":  # asked by some models of their layers
            return "full_attention"
        return super().__getattr__(name)


class NoEmbedding(nn.Module):
    """In place of the embedding of a stage that has hidden states from the one before."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden
        self.weight: Tensor

    def load(self, dtype: torch.dtype) -> None:
        """Have a weight to be asked for its device and dtype: made when the model is on no meta device any more."""
        self.register_buffer("weight", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Zeros [..., hidden size]."""
        return self.weight.new_zeros(*ids.shape, self._hidden)


def read_config(source: ModelSource, tensors: GgufTensors | None) -> PreTrainedConfig:
    """A model's configuration. tensors: of a GGUF model, whose metadata say it. Raises ConfigError for one that
    transformers does not know, or that is broken."""
    if tensors is not None:
        fields = config_from_gguf(tensors.file)
        with reported(f"transformers cannot make a configuration of the metadata of {source.path}"):
            return AutoConfig.for_model(**fields)
    with reported(f"transformers cannot read {source.path / 'config.json'}"):
        return AutoConfig.from_pretrained(source.path, trust_remote_code=False, local_files_only=True)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that computes a model's text. Raises ConfigError when transformers has none."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        with suppress(KeyError):
            found: type[PreTrainedModel] = mapping[type(config)]
            return found
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    for name in dir(module):
        if name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            named: type[PreTrainedModel] = getattr(module, name)
            return named
    raise ConfigError(f"transformers has no model that generates text for {type(config).__name__}")


def gguf_weights(tensors: GgufTensors, shell: PreTrainedModel) -> GgufWeights:
    """Weights of a GGUF file for a model on the meta device. Raises ConfigError as GgufWeights does."""
    text = shell.config.get_text_config(decoder=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in shell.state_dict().items()}
    if is_tied(shell.config):
        shapes.pop("lm_head.weight", None)
    return GgufWeights(tensors, shapes, text.num_hidden_layers, (text.num_attention_heads, text.num_key_value_heads))


def load_model(
    source: ModelSource,
    checkpoint: SafetensorsCheckpoint | GgufTensors,
    layers: range,
    dtype: torch.dtype,
    loading: LoadProgress,
    shard: Shard,
) -> PreTrainedModel:
    """A model with a shard's part of the weights of a stage's layers; of the embedding, and of the encoder of images
    that are served, where it has the first layer; of the head where it has the last one. Raises ConfigError for weights
    that are missing, left over or misshapen."""
    config = read_config(source, checkpoint if isinstance(checkpoint, GgufTensors) else None)
    text = config.get_text_config(decoder=True)
    for each in (config, text):
        each.__dict__.pop("quantization_config", None)  # weights are expanded as they are read
    text_only = text is not config and (layers.start > 0 or image_terms(config) is None)
    part = ModelPart(layers, text.num_hidden_layers, shard.index, shard.count, text_only)
    weights, elsewhere = _own_weights(checkpoint, config, part, dtype, loading)
    register()
    own_class = stage_class(model_class(config), part)
    with reported(f"transformers cannot load {source.path}"):
        model, info = own_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=_attention_of(config),
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    _set_experts(model)
    unexpected = set(info["unexpected_keys"]) - elsewhere
    for what, names in (
        ("is missing tensors", sorted(info["missing_keys"])),
        ("has tensors that the model does not read", sorted(unexpected)),
        ("has tensors of another shape", sorted(str(each[0]) for each in info["mismatched_keys"])),
    ):
        if names:
            raise ConfigError(f"{source.path} {what}: {first_of(names)}")
    for module in model.modules():
        if isinstance(module, NoEmbedding):
            module.load(dtype)
    model.eval().requires_grad_(False)
    return model


def _own_weights(
    checkpoint: SafetensorsCheckpoint | GgufTensors,
    config: PreTrainedConfig,
    part: ModelPart,
    dtype: torch.dtype,
    loading: LoadProgress,
) -> tuple[dict[str, Tensor], set[str]]:
    """Tensors of a part of a model by their stored names, and the names of those that other parts may have."""
    stored: NamedTensors | GgufWeights = checkpoint
    cuts: dict[str, Cut] = {}
    elsewhere: set[str] = set()
    left_out: set[str] = set()
    if isinstance(checkpoint, GgufTensors) or not part.whole:
        shell = on_meta(model_class(config), config)
        elsewhere = set(shell.state_dict())
        if isinstance(checkpoint, GgufTensors):
            stored = gguf_weights(checkpoint, shell)
        if part.shards > 1:
            cuts = stored_cuts(shell, stored.names, part.shard, part.shards)
        if part.text_only:
            left_out = {name.rpartition(".")[2] for name in encoders(shell)}
    names = [
        name
        for name in sorted(stored.names)
        if _is_read(name, part) and left_out.isdisjoint(name.split(".")) and not _is_elsewhere(name, cuts)
    ]
    with ThreadPoolExecutor(LOADERS) as loaders:
        read = partial(_read, stored, dtype, loading, cuts)
        return dict(zip(names, loaders.map(read, names), strict=True)), elsewhere


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The layers of a model's text. Raises ConfigError when they are not found."""
    for name, module in model.named_modules():
        other = any(word in name for word in OTHER_INPUTS)
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] in LAYER_LISTS and not other:
            return module
    raise ConfigError(f"the layers of {type(model).__name__} were not found")


def encoders(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Models within a model that compute no text, by name: they have a configuration of their own kind."""
    config = model.config
    text = {type(config), type(config.get_text_config(decoder=True))}
    inner = {name: each for name, each in model.named_modules() if isinstance(each, PreTrainedModel)}
    found = {name: each for name, each in inner.items() if type(each.config) not in text}
    return {name: each for name, each in found.items() if not any(name.startswith(f"{other}.") for other in found)}


def length_ropes(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose rotations depend on the longest position of a batch."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if (set(kind.values()) if isinstance(kind, dict) else {kind}) & LENGTH_ROPES:
            yield module


def body_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The child of a model that has its layers, and its name: all of it but the head."""
    blocks = layer_list(model)
    [found] = [(name, child) for name, child in model.named_children() if blocks in list(child.modules())]
    return found


def call(model: nn.Module, cache: RowsCache, **given: Any) -> Any:
    """Run a model with our cache."""
    name = next(each for each in CACHE_NAMES if each in inspect.signature(model.forward).parameters)
    return model(**given, **{name: cache}, use_cache=False)


def check_version() -> None:
    """Raises ConfigError for a release of transformers that this package was not tested with."""
    if not transformers.__version__.startswith(f"{VERSION}."):
        raise ConfigError(
            f"models without a decoder of our own need transformers {VERSION}, this is {transformers.__version__}"
        )


def on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model without weights. Raises ConfigError for a configuration that it cannot be made of."""
    register()
    with reported(f"transformers cannot make {cls.__name__} of this configuration"), torch.device("meta"):
        shell: PreTrainedModel = cls._from_config(config, attn_implementation=_attention_of(config))
    _set_experts(shell)
    return shell.eval()


def _attention_of(config: PreTrainedConfig) -> Any:
    """Our attention for the text, transformers' own for other inputs."""
    parts = tuple(config.sub_configs)
    if not parts:
        return NAME
    return {part: NAME if part in ("text_config", "") else "eager" for part in ("", *parts)}


def _set_experts(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "config"):
            with suppress(AttributeError):
                setattr(module.config, "_experts_implementation", NAME)  # noqa: B010


def stage_class(cls: type[PreTrainedModel], part: ModelPart) -> type[PreTrainedModel]:
    """A model's class whose instances are a part of it. They are made on the meta device."""
    if part.whole:
        return cls
    layers, last = part.layers, part.layers.stop == part.total

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **named: Any) -> None:
        cls.__init__(self, config, *args, **named)
        if part.shards > 1:
            plan = plan_of(config.get_text_config(decoder=True))
            shrink(self, cuts_of(self, plan, part.shard, part.shards))
        blocks = layer_list(self)
        for each in range(part.total):
            if each not in layers:
                blocks[each] = OtherLayer({layers.start - 1: "before", layers.stop: "behind"}.get(each, ""))
        for name in encoders(self) if part.text_only else ():
            self.set_submodule(name, nn.Identity())
        if layers.start and not (last and is_tied(config)):
            self.set_input_embeddings(NoEmbedding(config.get_text_config(decoder=True).hidden_size))
        if not last and hasattr(self, "lm_head"):
            self.lm_head = nn.Identity()

    untied: dict[str, Any] = {} if last else {"_tied_weights_keys": {}}
    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__, **untied})


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether the head is the embedding, as far as a configuration says; a wrapper and its text may say it."""
    return any(getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config(decoder=True)))


def _read(
    stored: "NamedTensors | GgufWeights", dtype: torch.dtype, loading: LoadProgress, cuts: Mapping[str, Cut], name: str
) -> Tensor:
    weight = stored.read(name, stored.shape(name))
    if (cut := cuts.get(name)) is not None:
        weight = weight.narrow(cut.axis, cut.own.start, len(cut.own)).clone()  # the whole one is not kept
    loading.read(weight.numel())
    return weight.to(dtype)


def _is_elsewhere(name: str, cuts: Mapping[str, Cut]) -> bool:
    """Whether another shard has all of a tensor."""
    return name in cuts and not cuts[name].own


def _is_read(name: str, part: ModelPart) -> bool:
    """Whether a part of a model reads a tensor: not those of other layers."""
    parts = name.split(".")
    for kind, number in pairwise(parts):
        if kind in LAYER_LISTS and number.isdigit() and not any(word in name for word in OTHER_INPUTS):
            return int(number) in part.layers or int(number) >= part.total
    return True


@contextmanager
def reported(failed: str) -> Iterator[None]:
    """Turn whatever code of transformers raises into ConfigError, in one line of bounded length; its progress bars and
    warnings are left out: what they warn of is an error here."""
    try:
        with _quiet():
            yield
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"{failed}: {what}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and warnings of transformers."""
    bars, level = transformers.utils.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
