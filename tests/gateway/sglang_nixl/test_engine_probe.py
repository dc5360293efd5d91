"""What an SGLang decode engine says of its set-up decides whether it is served: real HTTP, scripted answers."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from headrace.core.types.errors import ConfigError
from headrace.gateway.engine_http import EngineUnreachable
from headrace.gateway.sglang_nixl.engine_probe import probe
from headrace.gateway.sglang_nixl.releases import RELEASES
from tests.gateway.sglang_nixl.room_bench import GEOMETRY
from tests.gateway.sglang_nixl.server_info import InfoServer


@pytest.fixture
def engine() -> Iterator[InfoServer]:
    with closing(InfoServer()) as made:
        yield made


def refusal(engine: InfoServer, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        probe(engine.url, GEOMETRY, **options)
    assert engine.url in str(raised.value)
    return str(raised.value)


def test_an_engine_that_fits(engine: InfoServer) -> None:
    assert probe(engine.url, GEOMETRY, api_key="k").version == "0.5.23"
    assert engine.keys == ["Bearer k"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 1}, ("--page-size is 1 ", "serves 16", "--sglang-page-size")),
        ({"disaggregation_mode": "null"}, ("--disaggregation-mode is null", "decode")),
        ({"disaggregation_mode": "prefill"}, ("--disaggregation-mode is prefill", "decode")),
        ({"disaggregation_transfer_backend": "mooncake"}, ("mooncake", "nixl")),
        ({"pp_size": 2}, ("--pp-size is 2", "1")),
        ({"speculative_algorithm": "EAGLE"}, ("EAGLE", "None")),
        ({"dtype": "bfloat16"}, ("its KV is bfloat16", "float32")),
        ({"kv_cache_dtype": "bfloat16"}, ("its KV is bfloat16", "--dtype float32", "servers float32")),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("its KV is fp8_e4m3", "float32")),
        ({"version": "0.5.22"}, ("SGLang 0.5.22", "0.5.23", "--allow-untested")),
        ({"page_size": "x"}, ("not SGLang's",)),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    engine: InfoServer, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    engine.info |= changes
    text = refusal(engine)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("dtype", "kv", "ours"),
    [
        ("auto", "auto", "float32"),
        ("auto", "bf16", "bfloat16"),
        ("half", "auto", "float16"),
        ("float16", "bfloat16", "bfloat16"),
    ],
)
def test_names_of_dtypes(engine: InfoServer, dtype: str, kv: str, ours: str) -> None:
    """auto tells nothing: then the size of a page does, when the engine registers."""
    engine.info |= {"dtype": dtype, "kv_cache_dtype": kv}
    probe(engine.url, msgspec.structs.replace(GEOMETRY, dtype=ours))


def test_another_release_is_served_if_that_is_allowed_and_the_rest_fits(engine: InfoServer) -> None:
    engine.info |= {"version": "0.6.0"}
    assert "0.6.0" not in RELEASES
    assert probe(engine.url, GEOMETRY, allow_untested=True).version == "0.6.0"
    engine.info |= {"page_size": 64}
    assert "--page-size is 64" in refusal(engine, allow_untested=True)


def test_an_engine_that_does_not_answer(engine: InfoServer) -> None:
    engine.status = 503
    with pytest.raises(EngineUnreachable, match="answers 503"):
        probe(engine.url, GEOMETRY)
    engine.status = 401
    assert "--decode-api-key" in refusal(engine)
    engine.status = 404
    assert "it is no SGLang server" in refusal(engine)
    with pytest.raises(EngineUnreachable, match="refused"):
        probe("http://127.0.0.1:1", GEOMETRY)
