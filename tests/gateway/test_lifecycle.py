"""How a gateway starts, what /ready says, how it notices decode engines that end or change, and how it drains."""

import asyncio
from typing import Any

import pytest

from headrace.core.types.errors import ConfigError
from headrace.gateway.vllm import engines, model_check
from headrace.gateway.vllm.engines import WatchedEngine
from headrace.gateway.vllm_nixl.compatibility import Factors, compatibility_hash
from tests.gateway.site import Site, gateway_site
from tests.gateway.vllm_nixl.engines import AGENT, BLOCK, HASH, MODEL, metadata
from tests.gateway.vllm_nixl.scripted_engine import handshake
from tests.server.fakes import in_loop

IDS = [3, 1, 4]


async def ready(site: Site) -> str:
    """What /ready says is missing; "" for nothing."""
    answer = await site.http.get("/ready")
    return "" if answer.status_code == 200 else answer.json()["error"]["message"]


async def until(condition: Any) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PROBE_S", 0.05)


@in_loop
async def test_it_serves_and_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, start=False) as site:
        site.decode.answers["/version"] = (503, {})
        starting = asyncio.create_task(site.gateway.start())
        try:
            await until(lambda: _says(site, "GET /version answers 503; waiting for it"))
            assert (await site.http.get("/health")).status_code == 200
            refused = await site.post(prompt=IDS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert (await site.http.get("/v1/models")).status_code == 503
            site.decode.answers["/version"] = (200, {"version": "0.32.0"})
            await starting
        finally:
            starting.cancel()
        assert await ready(site) == ""
        [model] = (await site.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("smollm2", 4096)
        assert (await site.http.get("/v1/models/smollm2")).json() == model
        missing = await site.http.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def _says(site: Site, words: str) -> bool:
    return words in await ready(site)


@in_loop
async def test_an_engine_that_does_not_fit_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, start=False) as site:
        site.decode.answers["/version"] = (200, {"version": "0.29.0"})
        with pytest.raises(ConfigError, match=r"vLLM 0\.29\.0; tested are 0\.30\.0, 0\.31\.0"):
            await site.gateway.start()


@in_loop
async def test_an_engine_that_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        site.decode.payload = handshake(metadata(engine_id="another"))
        await until(lambda: _gone(site))
        assert site.exporter.gone == [(AGENT, [AGENT])], "told once, with the agents that are there"
        assert await ready(site) == ""
        changed = metadata(engine_id="third", block_size=BLOCK // 2, block_lens=(3 * BLOCK * 2 * 64 * 4,) * 30)
        site.decode.payload = handshake(changed, "0" * 64)
        await until(lambda: _says(site, f"decode engine {site.decode.url}: "))
        assert "compatibility hash" in await ready(site)
        assert await site.count("gateway_decode_engines_up") == 0
        refused = await site.post(prompt=IDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_engine")
        site.decode.payload = handshake(metadata(engine_id="fourth"), HASH)
        await until(lambda: _says(site, ""))
        await until(lambda: _ready(site))


@in_loop
async def test_an_engine_that_comes_back_as_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rolling upgrade: it is served, and answered with its own hash."""
    async with gateway_site(monkeypatch) as site:
        assert site.exporter.served == [[HASH]]
        factors = Factors(
            vllm_version="0.33.0", nixl_connector_version=15, model=MODEL, dtype="torch.float32", num_kv_heads=3,
            head_size=64, num_hidden_layers=30, attn_backend_name="CPU_ATTN",
        )  # fmt: skip
        newer = compatibility_hash(factors)
        site.decode.answers["/version"] = (200, {"version": "0.33.0"})
        site.decode.payload = handshake(metadata(engine_id="upgraded"), newer)
        await until(lambda: _gone(site))
        assert site.exporter.served[-1] == [newer]
        assert await ready(site) == ""


@in_loop
async def test_one_engine_with_other_values_is_offered_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router chooses the engine, and may choose that one; one that is only down takes no request."""
    async with gateway_site(monkeypatch) as site:
        engines = site.gateway._engines
        other = WatchedEngine(engines.all[0].address, engines.all[0].client)
        other.found, other.reason = engines.all[0].found, "geometry: blocks of 256 here, of 128 there"
        engines.all.append(other)
        refused = await site.post(prompt=IDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_engine")
        assert "blocks of 256 here" in refused.json()["error"]["message"]
        other.missed = 1
        assert (await site.post(prompt=IDS)).status_code == 200
        engines.all.pop()


async def _gone(site: Site) -> bool:
    return bool(site.exporter.gone)


async def _ready(site: Site) -> bool:
    return not await ready(site)


@in_loop
async def test_a_drain_waits_for_requests_and_for_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, drain_timeout_s=20.0) as site:
        await site.post(prompt=IDS)
        draining = asyncio.create_task(site.gateway.drain())
        await until(lambda: _says(site, "the gateway is draining"))
        assert (await site.post(prompt=IDS)).json()["error"]["code"] == "draining"
        assert not draining.done(), "a decode engine has not read what it was told of"
        handoffs = site.gateway._parts.handoffs  # type: ignore[union-attr]
        handoffs.released(site.peer.loads()[0].id)
        await draining


@in_loop
async def test_keys_are_asked_for_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"api_keys": ("ours",), "prefill_api_key": "theirs", "decode_api_key": "engine"}
    async with gateway_site(monkeypatch, **keys) as site:
        assert (await site.post(prompt="x")).status_code == 401
        assert (await site.http.get("/ready")).status_code == 200
        site.http.headers["Authorization"] = "Bearer ours"
        assert (await site.post(prompt="x")).status_code == 200
        await site.posted(1)
        assert set(site.prefills[0].keys) == {"Bearer theirs"}
        assert {"Bearer engine"} <= set(site.decode.keys)


@in_loop
async def test_where_prompts_come_from_at_the_engine_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "# TYPE vllm:prompt_tokens_by_source_total counter\n"
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 17.0\n'
        'vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 1e+06\n'
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="x"} 5.0\n'
    )
    async with gateway_site(monkeypatch, start=False) as site:
        site.decode.answers["/metrics"] = (200, text.encode())
        await site.gateway.start()
        series = f'gateway_decode_prompt_tokens_total{{engine="{site.decode.url}",source="local_compute"}}'
        await until(lambda: _has(site, series))
        assert await site.count(series) == 1_000_017


@pytest.mark.parametrize("names", ["headrace", "vllm"])
@in_loop
async def test_gauges_under_vllms_names(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """The pool's, and the requests that are being answered."""
    async with gateway_site(monkeypatch, metrics_names=names) as site:
        with site.gateway.counted():
            lines = (await site.http.get("/metrics")).text.splitlines()
        pages = sum([await site.count(f'kv_pages{{state="{state}"}}') for state in ("free", "leased")])
    model = 'engine="0",model_name="smollm2"'
    expected = [
        f"vllm:num_requests_running{{{model}}} 1.0",
        f"vllm:num_requests_waiting{{{model}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{model}}} 0.0",
        f'vllm:cache_config_info{{block_size="128",{model},num_gpu_blocks="{pages:.0f}"}} 1.0',
    ]
    assert [line for line in lines if line.startswith("vllm:")] == (expected if names == "vllm" else [])


async def _has(site: Site, series: str) -> bool:
    return series in (await site.http.get("/metrics")).text


PREFILLED = {"first_token": {"top_logprobs": [{"id": 4, "logprob": -0.5}, {"id": 9, "logprob": -1.5}]}}


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ({"token_id:4": -0.501, "token_id:9": -1.49}, ""),
        ({"token_id:9": -0.4, "token_id:4": -1.6}, "the first one is 4 (logprob -0.5000) and 9 (logprob -0.4000)"),
        ({"token_id:4": -0.9, "token_id:9": -1.5}, "the first one is 4 (logprob -0.5000) and 4 (logprob -0.9000)"),
        ({"token_id:8": -0.1, "token_id:7": -3.0}, "and 8 (logprob -0.1000)"),
    ],
)
@in_loop
async def test_models_are_compared(top: dict[str, float], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, start=False, model_check=True) as site:
        site.prefills[0].answers["/v1/prefill"] = (200, PREFILLED)
        choice = {"text": "x", "logprobs": {"top_logprobs": [top]}}
        site.decode.answers["/v1/completions"] = (200, {"choices": [choice]})
        if not words:
            await site.gateway.start()
            assert {body["handoff"] for body in site.prompts()} == {"none"}
            return
        with pytest.raises(ConfigError) as raised:
            await site.gateway.start()
        assert words in str(raised.value)
        assert "--no-model-check" in str(raised.value)


@in_loop
async def test_models_that_cannot_be_compared_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_site(monkeypatch, model_check=True) as site:
        assert await ready(site) == ""
    assert "were not compared" in caplog.text


def test_near_ties_are_no_other_model() -> None:
    ours, theirs = {4: -0.70, 9: -0.71}, {9: -0.69, 4: -0.72}
    assert model_check.difference([ours] * 3, [theirs] * 3, 0.75) == ""
    assert model_check.difference([ours] * 3, [theirs] * 3, 0.01) != ""
