"""--remote on a gateway: prompts that are left to the decode engine, and what its costs are known from."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.core.types.requests.remote_prefill import PREFILL_REASONS, LocalForecast
from headrace.gateway.vllm import placement
from headrace.gateway.vllm.engine_costs import EngineCost, dearest
from headrace.scheduler.costs.decoding_load import WEIGHT
from headrace.server.upstream import server_watch
from tests.gateway.site import HANDOFF, Site, gateway_site
from tests.server.fakes import in_loop

PAGE = 4
IDS = [11, 12, 13]
LOAD = {"queued_seconds": 0.0, "seconds_per_squared_token": 0.0, "seconds_per_token": 0.001, "trusted": True}


def metrics(
    *, running: float = 0, waiting: float = 0, tokens: float = 0, seconds: float = 0.0, prefills: float = 0
) -> str:
    """What vLLM 0.32 says, other metrics left out."""
    labels = 'engine="0",model_name="smollm2"'
    return "\n".join(
        [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {float(running)}",
            f"vllm:num_requests_waiting{{{labels}}} {float(waiting)}",
            f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 9e+06',
            f"vllm:request_prefill_kv_computed_tokens_sum{{{labels}}} {float(tokens)}",
            f"vllm:request_prefill_kv_computed_tokens_count{{{labels}}} {float(prefills)}",
            f"vllm:request_prefill_time_seconds_sum{{{labels}}} {seconds}",
            f"vllm:request_prefill_time_seconds_count{{{labels}}} {float(prefills)}",
            f'vllm:request_prefill_time_seconds_bucket{{{labels},le="0.3"}} {float(prefills)}',
        ]
    )


def known(**counts: float) -> EngineCost:
    """An engine that was seen to compute 1,000 tokens in 0.5 s, as two prompts."""
    cost = EngineCost(PAGE)
    cost.take(metrics(), 0.0)
    cost.take(metrics(tokens=1000, seconds=0.5, prefills=2, **counts), 0.0)
    return cost


def test_the_speed_is_learnt_from_what_the_engine_computes() -> None:
    cost = EngineCost(PAGE)
    assert cost.forecast(range(100), "", 0.0) is None
    cost.take(metrics(tokens=5000, seconds=99.0, prefills=10), 0.0)
    assert cost.forecast(range(100), "", 0.0) is None, "nothing is known of when that was"
    cost.take(metrics(tokens=6000, seconds=99.5, prefills=12), 0.0)
    found = cost.forecast(range(100), "", 0.0)
    assert found is not None
    assert found.work_s == found.ttft_s == pytest.approx(0.05)
    cost.take(metrics(tokens=6010, seconds=109.5, prefills=22), 0.0)
    assert cost.forecast(range(100), "", 0.0) == found, "prompts of one token, whose KV was handed over, say nothing"
    cost.take(metrics(tokens=7, seconds=0.1, prefills=1), 0.0)
    assert cost.forecast(range(100), "", 0.0) == found, "it was started again"
    cost.take("", 0.0)
    assert cost.forecast(range(100), "", 0.0) == found, "it did not answer"


def test_who_waits_and_runs_there_counts() -> None:
    found = known(running=7, waiting=2).forecast(range(100), "", 0.0)
    assert found is not None
    assert found.delayed == 7 * WEIGHT + 2
    assert found.ttft_s == pytest.approx(0.05 + 2 * 0.25), "two prompts like those before"


def test_a_rate_that_is_given_is_not_learnt() -> None:
    cost = EngineCost(PAGE, rate=100.0)
    assert cost.forecast(range(50), "", 0.0) is None, "the engine has said nothing yet"
    cost.take(metrics(running=1), 0.0)
    found = cost.forecast(range(50), "", 0.0)
    assert found == LocalForecast(0.5, 0.5, WEIGHT, 0.0)


def stored(names: list[int], parent: int | None, tokens: list[int], **fields: object) -> BlockStored:
    return BlockStored(
        block_hashes=tuple(names),
        parent_block_hash=parent,
        token_ids=tuple(tokens),
        block_size=PAGE,
        **fields,  # type: ignore[arg-type]
    )


def test_cached_blocks_are_known_from_kv_events_whatever_the_engine_names_them() -> None:
    cost, prompt = known(), list(range(1, 20))
    cost.apply([stored([901, 902], None, prompt[:8])])
    assert cost.cached(prompt, 0.0) == 8
    cost.apply([stored([903], 902, prompt[8:12]), stored([907], 906, prompt[12:16])])
    assert cost.cached(prompt, 0.0) == 12, "a block whose parent is not known is not followed"
    cost.apply([stored([911], None, [5] * 4, lora_name="other")])
    assert cost.cached([5] * 9, 0.0) == 0, "KV of an adapter is another one"
    found = cost.forecast(prompt, "", 0.0)
    assert found is not None
    assert (found.cached_share, found.work_s) == (12 / 19, pytest.approx(7 * 0.0005))
    salted = cost.forecast(prompt, "secret", 0.0)
    assert salted is not None
    assert salted.cached_share == 0.0
    cost.apply([BlockRemoved(block_hashes=(903, 12345))])
    assert cost.cached(prompt, 0.0) == 8
    cost.apply([AllBlocksCleared()])
    assert cost.cached(prompt, 0.0) == 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=4), st.integers(0, 3))
def test_the_router_may_have_chosen_any_engine(costs: list[float], unknown: int) -> None:
    forecasts: list[LocalForecast | None] = [LocalForecast(each, 0.0, 0.0, 0.0) for each in costs]
    assert dearest(forecasts) == LocalForecast(max(costs), 0.0, 0.0, 0.0)
    assert (dearest([*forecasts, *[None] * unknown]) is None) == bool(unknown)
    assert dearest([]) is None


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are looked at a hundred times a second."""
    monkeypatch.setattr(placement, "LOOK_S", 0.01)
    monkeypatch.setattr(server_watch, "POLL_S", 0.01)


async def looked() -> None:
    """Both sides have been looked at."""
    await asyncio.sleep(0.3)


async def ready(site: Site, text: str, load: dict[str, object] | None = LOAD) -> None:
    """Start the gateway; both sides say what computing costs them, the engine twice."""
    site.decode.answers["/metrics"] = (200, metrics().encode())
    for prefill in site.prefills:
        prefill.answers["/v1/handoff"] = (200, {**HANDOFF, "page_size": 16, "load": load})
    await site.gateway.start()
    await looked()
    site.decode.answers["/metrics"] = (200, text.encode())
    await looked()


async def decisions(site: Site) -> dict[str, float]:
    found = {each: await site.count(f'gateway_prefill_decisions_total{{reason="{each}"}}') for each in PREFILL_REASONS}
    return {reason: count for reason, count in found.items() if count}


SLOW, FAST = metrics(tokens=1000, seconds=5.0, prefills=2), metrics(tokens=1000, seconds=0.01, prefills=2)


@in_loop
async def test_the_cheaper_side_computes_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, remote="cost", start=False) as site:
        await ready(site, SLOW)
        assert "kv_transfer_params" in (await site.post(prompt=IDS)).json()
        assert await decisions(site) == {"cheaper_there": 1}
        site.decode.answers["/metrics"] = (200, metrics(tokens=9e6, seconds=6.0, prefills=3).encode())
        await looked()
        answer = await site.post(prompt=[7, 8, 9])
        assert (answer.status_code, "kv_transfer_params" in answer.json()) == (200, False)
        assert answer.json()["usage"]["prompt_tokens"] == 3
        assert await decisions(site) == {"cheaper_there": 1, "cheaper_here": 1}
        assert await site.count('gateway_recomputed_total{reason="cheaper_here"}') == 1
        assert len(site.prompts()) == 1, "the other one was not posted"


@in_loop
async def test_what_the_only_engine_has_had_is_cached_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 tokens. 300 tokens take the engine 1.5 s, of which 256 are saved the second time."""
    async with gateway_site(monkeypatch, remote="cost", decode_prefill_rate=200.0, start=False) as site:
        await ready(site, metrics(running=1), {**LOAD, "seconds_per_token": 0.008})
        prompt = list(range(1, 301))
        assert "kv_transfer_params" in (await site.post(prompt=prompt)).json()
        assert "kv_transfer_params" not in (await site.post(prompt=[*prompt, 5])).json()
        assert await decisions(site) == {"cheaper_there": 1, "cached_here": 1}


@in_loop
async def test_without_a_cost_model_on_either_side_kv_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, remote="cost", start=False) as site:
        await ready(site, metrics())
        assert "kv_transfer_params" in (await site.post(prompt=IDS)).json()
        assert await decisions(site) == {"unknown_cost": 1}
    async with gateway_site(monkeypatch, remote="cost", decode_prefill_rate=1e6, start=False) as site:
        await ready(site, metrics(), None)
        assert "kv_transfer_params" in (await site.post(prompt=IDS)).json()
        assert await decisions(site) == {"unknown_cost": 1}


@in_loop
async def test_never_leaves_all_prompts_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, remote="never") as site:
        assert "kv_transfer_params" not in (await site.post(prompt=IDS)).json()
        assert await site.count('gateway_recomputed_total{reason="never"}') == 1
        assert await decisions(site) == {}
        assert site.prompts() == []
