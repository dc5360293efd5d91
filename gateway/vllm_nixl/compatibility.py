"""Compatibility hash of vLLM's NixlConnector: recomputed from outside, which proves what the decode engine runs. Pure.

The hash is SHA-256 over the JSON of the factors below (compute_nixl_compatibility_hash in vLLM's nixl/metadata.py). An
engine sends it in its handshake and refuses prefill sides with another one. The number of KV heads, the head size and
the dtype are in no message but this one: of those that fit the size of its blocks exactly one gives its hash.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import product

import msgspec
from msgspec.structs import replace

from headrace.core.types.kv.geometry import ITEM_BYTES
from headrace.gateway.vllm_nixl.releases import connector_version

DTYPES = ("bfloat16", "float16", "float32")
TENSOR_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # tensor parallel degrees that are tried
ONE_GROUP = "start it with --disable-hybrid-kv-cache-manager"
VERSIONS = range(1, 65)  # of NixlConnector, that are tried
QUANTIZED = ("fp8", "fp8_e4m3", "fp8_e5m2")
MOST_STAGES = 8  # pipeline parallel degrees that are tried


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the hash."""

    vllm_version: str
    nixl_connector_version: int
    model: str
    """As given to the engine's --model."""
    dtype: str
    """The dtype with "torch." before it."""
    num_kv_heads: int
    """KV heads of the whole model."""
    head_size: int
    num_hidden_layers: int
    attn_backend_name: str
    cache_dtype: str = "auto"
    is_hma_enabled: bool = True
    """The hybrid KV cache manager."""
    speculative_config: None = None
    """Set by engines whose speculative decoding reads hidden states, which are not served."""
    transfer_mode: str = "pull"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode engine says of itself."""

    vllm_version: str
    model: str
    layers: int
    """Regions of its KV cache."""
    token_bytes: int
    """Bytes of a token in one region of the worker that was asked."""
    attn_backend_name: str


def compatibility_hash(factors: Factors) -> str:
    """The hash in hexadecimal."""
    return hashlib.sha256(json.dumps(msgspec.structs.asdict(factors), sort_keys=True).encode()).hexdigest()


def find_factors(wanted: str, observed: Observed) -> Factors | None:
    """The factors of a decode engine that can be served, found by its hash; None when there are none."""
    return _first(wanted, _served(observed))


def explain_mismatch(wanted: str, observed: Observed) -> str:
    """Why find_factors() has found none: the factor with another value, with both values."""
    for name, ours, others in _deviations(observed):
        for value, factors in others:
            if compatibility_hash(factors) == wanted:
                return f"{name}: {value} at the decode engine; this gateway serves {ours}"
    return (
        f"its compatibility hash {wanted} is not that of a vLLM {observed.vllm_version} with NixlConnector version "
        f"{connector_version(observed.vllm_version)}, the model {observed.model!r} with {observed.layers} layers and "
        f"the attention backend {observed.attn_backend_name}, whichever its dtype and heads; an engine with EAGLE or "
        "MTP speculative decoding has such a hash, too, and cannot be served"
    )


def _first(wanted: str, candidates: Iterable[Factors]) -> Factors | None:
    return next((factors for factors in candidates if compatibility_hash(factors) == wanted), None)


def _served(observed: Observed) -> Iterator[Factors]:
    """Factors of all engines that can be served and fit what is observed."""
    for dtype in DTYPES:
        for heads, size in _shapes(observed.token_bytes, ITEM_BYTES[dtype]):
            for cache_dtype, hybrid in product(("auto", dtype), (True, False)):
                yield _factors(observed, dtype, heads, size, cache_dtype=cache_dtype, is_hma_enabled=hybrid)


def _deviations(observed: Observed) -> Iterator[tuple[str, str, Iterator[tuple[str, Factors]]]]:
    """Factors that differ from served ones: (name, what is served, (value, factors))."""
    expected = connector_version(observed.vllm_version)
    served = [factors for factors in _served(observed) if factors.cache_dtype == "auto" and factors.is_hma_enabled]
    yield (
        "version of NixlConnector",
        f"{expected} of vLLM {observed.vllm_version}",
        (
            (str(version), replace(one, nixl_connector_version=version))
            for version, one in product(VERSIONS, served)
            if version != expected
        ),
    )
    yield (
        "transfer mode",
        "pull (NixlConnector)",
        (("push (NixlPushConnector)", replace(one, transfer_mode="push")) for one in served),
    )
    yield (
        "dtype of the KV cache",
        f"unquantized caches ({', '.join(DTYPES)})",
        (
            (cache, _factors(observed, dtype, heads, size, cache_dtype=cache))
            for cache, dtype in product(QUANTIZED, DTYPES)
            for heads, size in _shapes(observed.token_bytes, 1)
        ),
    )
    yield (
        "layers of the model",
        f"engines of one pipeline stage; {observed.layers} layers are in the cache of its first worker"
        f" (a model with windows: {ONE_GROUP})",
        (
            (str(layers), replace(one, num_hidden_layers=layers))
            for layers, one in product(range(observed.layers + 1, MOST_STAGES * observed.layers + 1), served)
            if one.num_kv_heads <= 64
        ),
    )


def _shapes(token_bytes: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(KV heads of the whole model, head size) whose keys and values take so many bytes in one worker."""
    elements, rest = divmod(token_bytes, 2 * item_bytes)
    if rest:
        return
    for heads in range(1, min(elements, 256) + 1):
        if elements % heads == 0:
            for degree in TENSOR_SIZES:
                yield heads * degree, elements // heads


def _factors(
    observed: Observed, dtype: str, heads: int, size: int, *, cache_dtype: str = "auto", is_hma_enabled: bool = True
) -> Factors:
    return Factors(
        vllm_version=observed.vllm_version,
        nixl_connector_version=connector_version(observed.vllm_version),
        model=observed.model,
        dtype=f"torch.{dtype}",
        num_kv_heads=heads,
        head_size=size,
        num_hidden_layers=observed.layers,
        attn_backend_name=observed.attn_backend_name,
        cache_dtype=cache_dtype,
        is_hma_enabled=is_hma_enabled,
    )
