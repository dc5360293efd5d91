"""The specification of a model that transformers' modules compute: by passes on the meta device, before a weight is
read."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress

import torch
from msgspec.structs import replace
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ring_positions
from headrace.engine.library.cache import RowsCache
from headrace.engine.library.hooks import running
from headrace.engine.library.images import image_encoding, image_terms, why_no_images
from headrace.engine.library.model import (
    LayersDone,
    ModelPart,
    NoEmbedding,
    OtherLayer,
    call,
    check_version,
    encoders,
    gguf_weights,
    is_tied,
    layer_list,
    length_ropes,
    model_class,
    on_meta,
    read_config,
    reported,
    stage_class,
)
from headrace.engine.library.probe import TOKENS, Probe, Seen
from headrace.engine.library.shards import EXPERTS, cuts_of, least_shards, plan_of, shrink, sizes_of
from headrace.engine.model.checkpoint import GgufTensors
from headrace.engine.model.config import ModelSpec, RopeSpec
from headrace.engine.model.library_spec import CachedLayer, Division, KeptState, LibrarySpec
from headrace.engine.model.source import ModelSource

UNLIMITED = 1 << 17  # positions of a model that names no limit
# Of a configuration: they do not change what is computed of a prompt.
UNCOMPUTED = (
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "model_type",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range",
    "attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "tie_word_embeddings",
    "quantization_config",
)  # fmt: skip


def library_spec(source: ModelSource) -> ModelSpec:
    """The specification of a model, by a pass of its modules on the meta device. Raises ConfigError for one that cannot
    be served, with the reason."""
    check_version()
    tensors = GgufTensors(source.path) if source.kind == "gguf" else None
    config = read_config(source, tensors)
    text = config.get_text_config(decoder=True)
    shell = on_meta(model_class(config), config)
    if tensors is not None:
        gguf_weights(tensors, shell)  # so that mistakes are found before a weight is read
    probe = _probe(shell, text.num_hidden_layers)
    name = type(shell).__name__
    longest = getattr(text, "max_position_embeddings", UNLIMITED)
    layers = _cached(probe, text.num_hidden_layers, longest, name)
    first = next((each for each in layers if each is not None), CachedLayer(1, 2, 2))
    blocks = layer_list(shell)
    shares = len(layers) // len(blocks)  # of a block that caches as several layers, all weights are the first one's
    owners = [blocks[layer // shares] if layer % shares == 0 else nn.Module() for layer in range(len(layers))]
    weights = [_parameters(block) for block in owners]
    linear = [_multiplied(block) for block in owners]
    active = [_multiplied(block, text) for block in owners]
    division, undivided = None, ""
    try:
        division, layers = _division(config, text, shell, probe, layers, owners)
    except ConfigError as error:
        undivided = str(error)
    before = shell.get_input_embeddings().weight.numel()
    images, tied = image_terms(config), is_tied(config)
    head = 0 if tied or not hasattr(shell, "lm_head") else _parameters(shell.lm_head)
    encoder = sum(_parameters(module) for module in encoders(shell).values())
    others = _parameters(shell) - sum(weights) - before - head - encoder
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
        tied=tied,
        library=LibrarySpec(
            architecture=name,
            cached=tuple(layers),
            weights=tuple(weights),
            linear=tuple(linear),
            active=tuple(active),
            embedding=before,
            encoder=encoder if images else 0,
            head=head,
            others=max(0, others),  # layers that share weights are counted with them more than once
            config=_digest(text),
            rotates_by_length=any(True for _ in length_ropes(shell)),
            divisible=_divides(config, text, len(blocks), len(layers)),
            states=tuple(_states(probe, layer) for layer in range(len(layers))),
            indexed=tuple(probe.indexed.get(layer, 0) for layer in range(len(layers))),
            mixers=tuple(sorted(probe.mixers)),
            uncalled=tuple(sorted(_names(shell, probe, called=False) - _names(shell, probe, called=True))),
            images=images,
            encoding=None if images is None else image_encoding(config, images),
            no_images=why_no_images(config),
            division=division,
            undivided=undivided,
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


def _division(
    config: PreTrainedConfig,
    text: PreTrainedConfig,
    shell: PreTrainedModel,
    whole: Probe,
    layers: Sequence[CachedLayer | None],
    owners: Sequence[nn.Module],
) -> tuple[Division, list[CachedLayer | None]]:
    """How shards divide a model, tried on the meta device with as few as can, and its layers with what they divide of
    their heads. whole: the pass over all of it. owners: the modules of each layer. Raises ConfigError where they cannot
    be divided, or keep states in parts."""
    plan = plan_of(text)
    sizes = sizes_of(shell, plan) | {seen.heads for seen in whole.seen}
    sizes |= {each.kv_heads for each in layers if each is not None and not each.expanded}
    shards = least_shards(sizes)
    if shards == 1:
        raise ConfigError(f"nothing divides its heads and inner widths ({', '.join(map(str, sorted(sizes)))})")
    if not (cuts := cuts_of(shell, plan, 0, shards)):
        raise ConfigError("its plan for shards divides nothing")
    part = on_meta(model_class(config), config)
    shrink(part, cuts)
    probe = _probe(part, len(layers))
    if (probe.states, probe.indexed) != (whole.states, whole.indexed):
        raise ConfigError("they would have parts of its states")
    heads = {layer: keys[0] for layer, (keys, _) in probe.cached.items()}
    found = [each and replace(each, divided=heads[layer] < each.kv_heads) for layer, each in enumerate(layers)]
    distinct = {each for each in found if each is not None}
    if len({each.names for each in distinct}) < len({(each.names, each.divided) for each in distinct}):
        raise ConfigError("they would have parts of the heads in some layers only")
    ids = {id(shell.get_parameter(name)) for name in cuts}
    divided = [[each for each in owner.parameters() if id(each) in ids] for owner in owners]
    return Division(
        sizes=tuple(sorted(sizes)),
        weights=tuple(sum(each.numel() for each in own) for own in divided),
        linear=tuple(sum(each.numel() for each in own if each.dim() > 1) for own in divided),
        experts=min((len(shell.get_parameter(name)) for name in cuts if cuts[name].style == EXPERTS), default=0),
    ), found


def _divides(config: PreTrainedConfig, text: PreTrainedConfig, blocks: int, layers: int) -> bool:
    """Whether two stages can compute a model, tried on the meta device: not where layers need token ids, give more than
    hidden states to the next one, or are asked for something by the model as a whole."""
    if getattr(text, "hidden_size_per_layer_input", 0) or blocks != layers or layers < 2:
        return False
    for own in (range(layers // 2), range(layers // 2, layers)):
        try:
            shell = on_meta(stage_class(model_class(config), ModelPart(own, layers)), config)
            with reported(f"{type(shell).__name__} has no stages"), suppress(LayersDone):
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


def _probe(shell: PreTrainedModel, layers: int) -> Probe:
    """What a pass over a model on the meta device asks for. Raises ConfigError where that is more than a pool has."""
    probe, name = Probe(), type(shell).__name__
    try:
        with reported(f"{name} cannot be computed over a paged pool"):
            _pass(shell, probe, layers)
    except ConfigError:
        if not probe.strangers:  # else what it looked for was not there
            raise
    if probe.strangers:
        strangers = ", ".join(sorted(probe.strangers))
        raise ConfigError(f"{name} has a cache of its own ({strangers}), which is not supported")
    return probe


def _pass(shell: PreTrainedModel, probe: Probe, layers: int) -> None:
    """A pass over a model on the meta device."""
    ids = torch.ones(1, TOKENS, dtype=torch.long, device="meta")
    positions = torch.arange(TOKENS, device="meta")[None]
    with running(probe), probe.watching(shell), torch.inference_mode():
        call(shell, RowsCache(probe, layers), input_ids=ids, position_ids=positions)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
