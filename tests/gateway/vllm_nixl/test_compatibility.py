"""The compatibility hash of vLLM 0.32's NixlConnector, and what is found by it."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.gateway.vllm_nixl.compatibility import (
    Factors,
    Observed,
    compatibility_hash,
    explain_mismatch,
    find_factors,
)
from tests.gateway.vllm_nixl.engines import HASH, MODEL

FACTORS = Factors(
    vllm_version="0.32.0", nixl_connector_version=14, model=MODEL, dtype="torch.float32", num_kv_heads=3, head_size=64,
    num_hidden_layers=30,
    attn_backend_name="CPU_ATTN",
)  # fmt: skip


def observed(factors: Factors = FACTORS, *, item: int = 4, degree: int = 1, layers: int = 30) -> Observed:
    """What an engine with these factors shows. degree: tensor parallel size."""
    heads = factors.num_kv_heads // degree or 1
    return Observed(
        vllm_version=factors.vllm_version, model=factors.model, layers=layers,
        token_bytes=2 * heads * factors.head_size * item, attn_backend_name=factors.attn_backend_name,
    )  # fmt: skip


def test_the_hash_that_a_vllm_computed() -> None:
    assert compatibility_hash(FACTORS) == HASH
    assert find_factors(HASH, observed()) == FACTORS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("heads", "size", "degree"), [(1, 64, 1), (8, 128, 1), (8, 128, 8), (5, 80, 1), (2, 256, 8)])
def test_heads_and_dtype_are_found(dtype: str, heads: int, size: int, degree: int) -> None:
    """Of bfloat16 and float16 the blocks have one size, and so do 2 heads of 128 and 4 of 64."""
    factors = replace(FACTORS, dtype=f"torch.{dtype}", num_kv_heads=heads, head_size=size)
    shown = observed(factors, item=4 if dtype == "float32" else 2, degree=min(degree, heads))
    assert find_factors(compatibility_hash(factors), shown) == factors
    explicit = replace(factors, cache_dtype=dtype, is_hma_enabled=False)
    assert find_factors(compatibility_hash(explicit), shown) == explicit


@pytest.mark.parametrize(("change", "words"), [
    ({"nixl_connector_version": 15}, "version of NixlConnector: 15 at the decode engine; this gateway serves 14"),
    ({"transfer_mode": "push"}, "transfer mode: push (NixlPushConnector) at the decode engine"),
    ({"num_hidden_layers": 60}, "layers of the model: 60 at the decode engine"),
    ({"model": "other"}, "with 30 layers and the attention backend CPU_ATTN"),
    ({"vllm_version": "0.31.0"}, "vLLM 0.32.0 with NixlConnector version 14"),
], ids=str)  # fmt: skip
def test_what_differs_is_named_with_both_values(change: dict[str, Any], words: str) -> None:
    wanted = compatibility_hash(replace(FACTORS, **change))
    assert find_factors(wanted, observed()) is None
    assert words in explain_mismatch(wanted, observed())


def test_a_quantized_cache_is_named() -> None:
    wanted = compatibility_hash(replace(FACTORS, cache_dtype="fp8", dtype="torch.bfloat16"))
    shown = observed(item=1)
    assert find_factors(wanted, shown) is None
    text = "dtype of the KV cache: fp8 at the decode engine; this gateway serves unquantized caches"
    assert text in explain_mismatch(wanted, shown)
