"""Building a model of transformers' modules: on the meta device to look at it, or with the weights of a stage's layers.

Never by code of a repository. Weights that are missing, left over or misshapen are errors.
"""

import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

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
from headrace.core.types.kv.geometry import ring_positions
from headrace.engine.library.cache import RowsCache
from headrace.engine.library.gguf_weights import GgufWeights
from headrace.engine.library.hooks import NAME, register, running
from headrace.engine.library.images import image_terms, why_no_images
from headrace.engine.library.probe import TOKENS, Probe, Seen
from headrace.engine.model.checkpoint import GgufTensors, NamedTensors, SafetensorsCheckpoint
from headrace.engine.model.config import ModelSpec, RopeSpec
from headrace.engine.model.gguf_config import config_from_gguf
from headrace.engine.model.library_spec import CachedLayer, KeptState, LibrarySpec
from headrace.engine.model.source import ModelSource

VERSION = "5.23"  # of transformers, whose hooks this package relies on; another one is tried with its own tests
LENGTH_ROPES = {"dynamic", "longrope"}
LOADERS = 4  # threads that read weights
LAYER_LISTS = ("layers", "h", "blocks")
UNLIMITED = 1 << 17  # positions of a model that names no limit
CACHE_NAMES = ("past_key_values", "cache_params")
OTHER_INPUTS = ("vision", "visual", "audio", "image")
# Of a configuration: they do not change what is computed of a prompt.
UNCOMPUTED = (
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "model_type",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range",
    "attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "tie_word_embeddings",
    "quantization_config",
)  # fmt: skip


class LayersDone(Exception):
    """The layers of a stage have run: the rest of the model belongs to the stages after it."""


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
        with _reported(f"transformers cannot make a configuration of the metadata of {source.path}"):
            return AutoConfig.for_model(**fields)
    with _reported(f"transformers cannot read {source.path / 'config.json'}"):
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


def library_spec(source: ModelSource) -> ModelSpec:
    """The specification of a model, by a pass of its modules on the meta device. Raises ConfigError for one that cannot
    be served, with the reason."""
    check_version()
    tensors = GgufTensors(source.path) if source.kind == "gguf" else None
    config = read_config(source, tensors)
    text = config.get_text_config(decoder=True)
    shell = _on_meta(model_class(config), config)
    if tensors is not None:
        gguf_weights(tensors, shell)  # so that mistakes are found before a weight is read
    probe = _probe(shell, text.num_hidden_layers)
    name = type(shell).__name__
    if probe.strangers:
        raise ConfigError(
            f"{name} has a cache of its own ({', '.join(sorted(probe.strangers))}), which is not supported"
        )
    longest = getattr(text, "max_position_embeddings", UNLIMITED)
    layers = _cached(probe, text.num_hidden_layers, longest, name)
    first = next((each for each in layers if each is not None), CachedLayer(1, 2, 2))
    blocks = layer_list(shell)
    shares = len(layers) // len(blocks)  # of a block that caches as several layers, all weights are the first one's
    owners = [blocks[layer // shares] if layer % shares == 0 else nn.Module() for layer in range(len(layers))]
    weights = [sum(parameter.numel() for parameter in block.parameters()) for block in owners]
    linear = [_multiplied(block) for block in owners]
    active = [_multiplied(block, text) for block in owners]
    before = shell.get_input_embeddings().weight.numel()
    every = sum(parameter.numel() for parameter in shell.parameters())
    return ModelSpec(
        family=str(text.model_type),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.hidden_size,
        layers=len(layers),
        heads=first.kv_heads * max(1, getattr(text, "num_attention_heads", 1) // first.kv_heads),
        kv_heads=first.kv_heads,
        head_dim=first.key_width + first.key_width % 2,
        norm_eps=1e-6,
        rope=RopeSpec(),
        max_positions=longest,
        tied=_tied(config),
        library=LibrarySpec(
            architecture=name,
            cached=tuple(layers),
            weights=tuple(weights),
            linear=tuple(linear),
            active=tuple(active),
            embedding=before,
            head=max(0, every - sum(weights) - before),
            config=_digest(text),
            rotates_by_length=any(True for _ in length_ropes(shell)),
            divisible=_divides(config, text, len(blocks), len(layers)),
            states=tuple(_states(probe, layer) for layer in range(len(layers))),
            indexed=tuple(probe.indexed.get(layer, 0) for layer in range(len(layers))),
            mixers=tuple(sorted(probe.mixers)),
            uncalled=tuple(sorted(_names(shell, probe, called=False) - _names(shell, probe, called=True))),
            images=image_terms(config),
            no_images=why_no_images(config),
        ),
    )


def _cached(probe: Probe, count: int, longest: int, name: str) -> list[CachedLayer | None]:
    """What each of so many layers caches. Raises ConfigError for what no pool holds. longest: sequence, in positions;
    one that is not much longer than a window needs no ring. name: of the model's class."""
    layers: list[CachedLayer | None] = [None] * count
    attending: dict[int, list[Seen]] = {}
    for seen in probe.seen:
        attending.setdefault(seen.layer, []).append(seen)
    for layer, ((heads, key_width), (value_heads, value_width)) in probe.cached.items():
        if heads != value_heads or layer >= count:
            raise ConfigError(f"{name} caches keys of {heads} and values of {value_heads} heads in layer {layer}")
        own = attending.get(layer, [])
        expanded = any(seen.expanded for seen in own)
        window = own[0].window if len(own) == 1 and not expanded else 0
        ring = window if 2 * ring_positions(window) <= longest else 0
        layers[layer] = CachedLayer(heads, key_width, value_width, expanded, ring)
    return layers


def _divides(config: PreTrainedConfig, text: PreTrainedConfig, blocks: int, layers: int) -> bool:
    """Whether two stages can compute a model, tried on the meta device: not where layers need token ids, give more than
    hidden states to the next one, or are asked for something by the model as a whole."""
    if getattr(text, "hidden_size_per_layer_input", 0) or blocks != layers or layers < 2:
        return False
    for own in (range(layers // 2), range(layers // 2, layers)):
        try:
            shell = _on_meta(_stage_class(model_class(config), own, layers), config)
            with _reported(f"{type(shell).__name__} has no stages"), suppress(LayersDone):
                shell.tie_weights()
                for each in shell.modules():
                    if isinstance(each, NoEmbedding):
                        with torch.device("meta"):
                            each.load(torch.float32)
                    if isinstance(each, OtherLayer):
                        each.given = torch.empty(1, TOKENS, text.hidden_size, device="meta")
                _pass(shell, Probe(), layers)
        except ConfigError:
            return False
    return True


def _names(shell: PreTrainedModel, probe: Probe, *, called: bool) -> set[str]:
    """Names of nn.Linear modules that a pass has called, or has not, each in its parent."""
    linear = [(name, module) for name, module in shell.named_modules() if type(module) is nn.Linear]
    return {name.split(".")[-1] for name, module in linear if (id(module) in probe.called) is called}


def _states(probe: Probe, layer: int) -> tuple[KeptState, ...]:
    """What a layer keeps of a request."""
    kept = probe.states.get(layer, {})
    return tuple(KeptState(kind, number, shape) for (kind, number), shape in kept.items())


def gguf_weights(tensors: GgufTensors, shell: PreTrainedModel) -> GgufWeights:
    """Weights of a GGUF file for a model on the meta device. Raises ConfigError as GgufWeights does."""
    text = shell.config.get_text_config(decoder=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in shell.state_dict().items()}
    if _tied(shell.config):
        shapes.pop("lm_head.weight", None)
    return GgufWeights(tensors, shapes, text.num_hidden_layers, (text.num_attention_heads, text.num_key_value_heads))


def load_model(
    source: ModelSource,
    checkpoint: SafetensorsCheckpoint | GgufTensors,
    layers: range,
    dtype: torch.dtype,
    loading: LoadProgress,
) -> PreTrainedModel:
    """A model with the weights of a stage's layers, of the embedding where it has the first and of the head where it
    has the last. Raises ConfigError for weights that are missing, left over or misshapen."""
    tensors = checkpoint if isinstance(checkpoint, GgufTensors) else None
    config = read_config(source, tensors)
    for part in (config, config.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)  # weights are expanded as they are read
    count = config.get_text_config(decoder=True).num_hidden_layers
    elsewhere: set[str] = set()
    stored: NamedTensors | GgufWeights = checkpoint
    if len(layers) < count or tensors is not None:
        shell = _on_meta(model_class(config), config)
        elsewhere = set(shell.state_dict())
        stored = gguf_weights(tensors, shell) if tensors is not None else checkpoint
    read = partial(_read, stored, dtype, loading)
    names = [name for name in sorted(stored.names) if _is_read(name, layers, count)]
    with ThreadPoolExecutor(LOADERS) as loaders:
        weights = dict(zip(names, loaders.map(read, names), strict=True))
    register()
    stage_class = _stage_class(model_class(config), layers, count)
    with _reported(f"transformers cannot load {source.path}"):
        model, info = stage_class.from_pretrained(
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


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The layers of a model's text. Raises ConfigError when they are not found."""
    for name, module in model.named_modules():
        other = any(word in name for word in OTHER_INPUTS)
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] in LAYER_LISTS and not other:
            return module
    raise ConfigError(f"the layers of {type(model).__name__} were not found")


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


def _on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    register()
    with _reported(f"transformers cannot make {cls.__name__} of this configuration"), torch.device("meta"):
        shell: PreTrainedModel = cls._from_config(config, attn_implementation=_attention_of(config))
    _set_experts(shell)
    return shell.eval()


def _pass(shell: PreTrainedModel, probe: Probe, layers: int) -> None:
    """A pass over a model on the meta device."""
    ids = torch.ones(1, TOKENS, dtype=torch.long, device="meta")
    positions = torch.arange(TOKENS, device="meta")[None]
    with running(probe), probe.watching(shell), torch.inference_mode():
        call(shell, RowsCache(probe, layers), input_ids=ids, position_ids=positions)


def _probe(shell: PreTrainedModel, layers: int) -> Probe:
    """What a pass over a model on the meta device asks for."""
    probe = Probe()
    try:
        with _reported(f"{type(shell).__name__} cannot be computed over a paged pool"):
            _pass(shell, probe, layers)
    except ConfigError:
        if not probe.strangers:  # else what it looked for was not there
            raise
    return probe


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


def _stage_class(cls: type[PreTrainedModel], layers: range, count: int) -> type[PreTrainedModel]:
    """A model's class whose instances have these layers only."""
    if len(layers) == count:
        return cls
    last = layers.stop == count

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **named: Any) -> None:
        cls.__init__(self, config, *args, **named)
        blocks = layer_list(self)
        for each in range(count):
            if each not in layers:
                blocks[each] = OtherLayer({layers.start - 1: "before", layers.stop: "behind"}.get(each, ""))
        if layers.start and not (last and _tied(config)):
            self.set_input_embeddings(NoEmbedding(config.get_text_config(decoder=True).hidden_size))
        if not last and hasattr(self, "lm_head"):
            self.lm_head = nn.Identity()

    untied: dict[str, Any] = {} if last else {"_tied_weights_keys": {}}
    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__, **untied})


def _tied(config: PreTrainedConfig) -> bool:
    """Whether the head is the embedding, as far as a configuration says; a wrapper and its text may say it."""
    return any(getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config(decoder=True)))


def _read(stored: "NamedTensors | GgufWeights", dtype: torch.dtype, loading: LoadProgress, name: str) -> Tensor:
    weight = stored.read(name, stored.shape(name))
    loading.read(weight.numel())
    return weight.to(dtype)


def _is_read(name: str, layers: range, count: int) -> bool:
    """Whether a stage with these layers reads a tensor: not those of other layers."""
    parts = name.split(".")
    for kind, number in pairwise(parts):
        if kind in LAYER_LISTS and number.isdigit() and not any(word in name for word in OTHER_INPUTS):
            return int(number) in layers or int(number) >= count
    return True


def _multiplied(block: nn.Module, text: PreTrainedConfig | None = None) -> int:
    """Parameters of a layer's matrices. text: of experts only as many as a token goes through."""
    most = getattr(text, "num_experts_per_tok", None) or 1
    total = 0
    for parameter in block.parameters():
        if parameter.dim() > 1:
            joined = parameter.dim() == 3 and text is not None  # experts, with a matrix each
            total += parameter.numel() * min(most, len(parameter)) // len(parameter) if joined else parameter.numel()
    return total


def _digest(text: PreTrainedConfig) -> str:
    fields = {key: value for key, value in text.to_dict().items() if key not in UNCOMPUTED}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def _reported(failed: str) -> Iterator[None]:
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
