"""vLLM's model in terms of the protocol: fingerprint, layers in order, geometry of the KV cache."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.source import load_spec, resolve_source

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NUMBER = re.compile(r"\.(\d+)\.")


def model_fingerprint(model: str) -> str:
    """Fingerprint of a folder or hub id. Raises ConfigError, with the alternative, when its files cannot be read."""
    try:
        source = resolve_source(model)
        spec = load_spec(source)
        return fingerprint(spec, open_checkpoint(source, spec))
    except ConfigError as error:
        raise ConfigError(
            f"no fingerprint of {model} could be made ({error}); if you are sure that the prefill server has the same "
            'weights, take its own (GET /v1/handoff) as "fingerprint" in kv_connector_extra_config'
        ) from error


def ordered_layers(layers: Mapping[str, Any], caches: Mapping[str, Tensor]) -> list[tuple[Any, Tensor]]:
    """Attention layers with their caches, in layer order. Raises ConfigError unless the model has one attention per
    layer, and all of its layers here."""
    numbered: dict[int, tuple[Any, Tensor]] = {}
    for name, cache in caches.items():
        found = _NUMBER.search(f".{name}.")
        if found is None or int(found[1]) in numbered or name not in layers:
            raise ConfigError(f"layer {name!r} of the KV cache: only models with one attention per layer can be loaded")
        numbered[int(found[1])] = layers[name], cache
    if sorted(numbered) != list(range(len(numbered))):
        raise ConfigError(f"the KV cache has layers {sorted(numbered)}: pipeline stages of vLLM are not supported")
    return [numbered[number] for number in range(len(numbered))]


def cache_geometry(layers: list[tuple[Any, Tensor]]) -> Geometry:
    """Geometry of the whole model's KV, with page size 1. Raises ConfigError for a cache that cannot be filled: layers
    that differ, latents, a dtype or attention backend without support."""
    if any(hasattr(layer, "kv_lora_rank") for layer, _ in layers):
        raise ConfigError(
            "the model has multi-head latent attention (MLA): this connector fills caches of keys and values only; "
            "start vLLM without --kv-transfer-config, or take a decode server of headrace"
        )
    shapes = {(layer.num_kv_heads, layer.head_size, layer.head_size_v, cache.dtype) for layer, cache in layers}
    if len(shapes) != 1:
        raise ConfigError(f"the layers of the KV cache differ: {sorted(map(str, shapes))}")
    heads, keys, values, dtype = shapes.pop()
    if dtype not in DTYPES or keys != values:
        raise ConfigError(
            f"a KV cache of {dtype} with keys of {keys} and values of {values}: headrace fills caches of "
            f"{', '.join(DTYPES.values())} with keys and values of one size"
        )
    for layer, _ in layers:
        if not callable(layer.impl.do_kv_cache_update):
            raise ConfigError(
                f"{type(layer.impl).__name__} has no do_kv_cache_update; choose another attention backend"
            )
    return Geometry(DTYPES[dtype], len(layers), heads, keys, page_size=1)
