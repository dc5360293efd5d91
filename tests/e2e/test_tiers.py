"""Host and disk tiers of whole servers: cached pages come back with equal text, and from disk after a restart."""

from pathlib import Path

import pytest

from tests.e2e.harness import Server, pair, serving

PAGES, TOKENS = 260, 2000
FLAGS = ("--role", "colocated", "--kv-pages", str(PAGES), "--max-model-len", "2304", "--page-size", "16")
LONG_TOKENS = 4000
LONG_FLAGS = (
    "--kv-pages",
    "600",
    "--max-model-len",
    "4352",
    "--page-size",
    "16",
)  # loads take half of the pool at most
STUB = ("--model", "stub:us_per_token=5", "--served-model-name", "stub")


def text(server: Server, seed: int, tokens: int = TOKENS, model: str = "smollm2") -> tuple[str, int, int]:
    """The completion of a long prompt, and how many of its tokens were cached, and those loaded from a tier."""
    vocabulary = 150 if model == "stub" else 20_000  # a stub's higher ids end the text
    prompt = [100 + (seed * 7919 + index * 31) % vocabulary for index in range(tokens)]
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    reply = server.post("/v1/completions", body).json()
    details = reply["usage"].get("prompt_tokens_details") or {}
    by_tier = details.get("cached_tokens_details", {})
    return reply["choices"][0]["text"], details.get("cached_tokens", 0), by_tier.get("host", 0) + by_tier.get("disk", 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "stages"),
    [
        ("stub", 2),
        pytest.param("smollm2", 1, marks=pytest.mark.full),
        pytest.param("smollm2", 2, marks=pytest.mark.full),
    ],
)
def test_pages_come_back_from_the_host_tier_with_equal_text(model: str, stages: int) -> None:
    flags = (*FLAGS, *(STUB if model == "stub" else ()), "--threads", "1", "--pp", str(stages))
    with serving(*flags, "--host-pages", "1000") as server:
        first = text(server, 1, model=model)
        for seed in (2, 3):
            text(server, seed, model=model)
        again = text(server, 1, model=model)
        assert again[0] == first[0]
        assert again[1] >= 1900
        assert again[2] > 1000
        assert server.total("headrace_kv_tier_hit_tokens_total") > 1000


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2])
def test_a_restarted_server_finds_its_prefixes_on_disk(stages: int, tmp_path: Path) -> None:
    flags = (*FLAGS, "--pp", str(stages), "--disk-path", str(tmp_path / "kv"), "--disk-admission-turn", "0")
    with serving(*flags) as server:
        first = text(server, 1)
        text(server, 2)
        text(server, 1)
    with serving(*flags) as server:
        again = text(server, 1)
        assert again[0] == first[0]
        assert again[1] >= 1900
        assert server.metrics()['headrace_kv_tier_hit_tokens_total{tier="disk"}'] >= 1900


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param("stub", STUB, id="stub"),
        pytest.param("stub", (*STUB, "--pp", "2"), id="stub-pp2"),
        pytest.param("smollm2", ("--threads", "1"), id="smollm2"),
    ],
)
def test_a_restarted_pair_finds_its_prefixes_on_disk(model: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """The decode server starts again too, so that nothing comes from its own prefix cache."""
    prefill_flags = (*LONG_FLAGS, *flags, "--disk-path", str(tmp_path / "kv"), "--disk-admission-turn", "0")
    decode_flags = (*LONG_FLAGS, *(STUB if model == "stub" else flags))
    with pair(prefill_flags, decode_flags) as (prefill, decode):
        first = text(decode, 1, LONG_TOKENS, model)
        assert prefill.total("headrace_kv_tier_hit_tokens_total") == 0
        computed = prefill.total("headrace_prompt_tokens_total") - prefill.total("headrace_cached_tokens_total")
        assert computed >= LONG_TOKENS
    with pair(prefill_flags, decode_flags) as (prefill, decode):
        again = text(decode, 1, LONG_TOKENS, model)
        assert again[0] == first[0]
        assert again[2] >= 3900, "the decode server says what the prefill server told it"
        assert prefill.metrics()['headrace_kv_tier_hit_tokens_total{tier="disk"}'] >= 3900
