"""KV hints on whole servers: what was retained, demoted and prefetched gives equal text; the answers are true."""

import time
from typing import Any

import pytest

from tests.e2e.harness import Server, pair, serving
from tests.e2e.test_tiers import FLAGS, STUB

TOKENS = 2000
Granted = dict[str, Any]


def prompt(seed: int) -> list[int]:
    return [100 + (seed * 7919 + index * 31) % 150 for index in range(TOKENS)]


def hints(**actions: dict[str, Any]) -> dict[str, Any]:
    given = [
        {"action_id": f"my-{name}", "action_type": name, "action_version": "1", "payload": payload}
        for name, payload in actions.items()
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": given}


def ask(server: Server, model: str, seed: int, **more: Any) -> tuple[str, int, int, list[Granted]]:
    """The completion of a prompt, its cached tokens and those of them from a tier, and what was granted."""
    body = {"model": model, "prompt": prompt(seed), "max_tokens": 8, "temperature": 0, **more}
    reply = server.post("/v1/completions", body).json()
    details = reply["usage"]["prompt_tokens_details"]
    tiers = details.get("cached_tokens_details", {})
    loaded = tiers.get("host", 0) + tiers.get("disk", 0)
    return reply["choices"][0]["text"], details["cached_tokens"], loaded, reply["headrace"].get("kv_hints", [])


def hint(server: Server, model: str, seed: int, **actions: dict[str, Any]) -> list[Granted]:
    body = {"model": model, "prompt_token_ids": prompt(seed), "kv_hints": hints(**actions)}
    granted: list[Granted] = server.post("/v1/kv_hints", body).json()["kv_hints"]
    return granted


def wait_for(server: Server, metric: str, least: float) -> None:
    deadline = time.monotonic() + 30
    while server.metrics().get(metric, 0.0) < least:
        assert time.monotonic() < deadline, f"{metric} stays below {least}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param("stub", STUB, id="stub"),
        pytest.param("smollm2", ("--threads", "1"), id="smollm2", marks=pytest.mark.full),
    ],
)
def test_kv_that_was_retained_demoted_and_prefetched_gives_equal_text(model: str, flags: tuple[str, ...]) -> None:
    with serving(*FLAGS, *flags, "--host-pages", "1000", "--retain-percent", "50") as server:
        first, cached, _, granted = ask(server, model, 1, kv_hints=hints(retain={"seconds": 600}, dance={}))
        assert cached == 0
        assert [(each["action_id"], each["granted"]) for each in granted] == [("my-retain", True), ("my-dance", False)]
        assert granted[0]["tokens"] >= 1984
        assert server.metrics()["headrace_retained_pages"] >= 124
        for seed in (2, 3, 4):
            ask(server, model, seed)
        again, cached, loaded, _ = ask(server, model, 1)
        assert (again, cached >= 1984, loaded) == (first, True, 0), "retained: it has not left the pool"

        stored = 'headrace_kv_tier_pages_total{result="stored",tier="host"}'
        before = server.metrics()[stored]
        (demoted,) = hint(server, model, 1, demote={})
        assert demoted["tokens"] >= 1900
        wait_for(server, stored, before + demoted["tokens"] // 16)
        assert server.metrics()["headrace_retained_pages"] == 0
        (fetched,) = hint(server, model, 1, prefetch={"ttl": 600})
        assert fetched["tokens"] >= 1984
        wait_for(server, 'headrace_kv_tier_hit_tokens_total{tier="host"}', 1900)
        again, cached, loaded, _ = ask(server, model, 1)
        assert (again, cached >= 1984, loaded) == (first, True, 0), "prefetched: it was in the pool before the request"

        first, cached, _, granted = ask(server, model, 6, kv_hints=hints(prefetch={}, demote={}, retain={"seconds": 9}))
        assert [(each["granted"], each["reason"]) for each in granted] == [
            (False, "no cached KV of it was there to load or to fetch"),
            (True, ""),
            (False, "it is demoted or released when the request ends"),
        ]
        assert granted[1]["tokens"] >= 1984
        wait_for(server, 'headrace_kv_pages{state="free"}', granted[1]["tokens"] // 16)
        again, cached, loaded, granted = ask(server, model, 6, kv_hints=hints(prefetch={"seconds": 600}))
        assert (again, loaded >= 1900) == (first, True), "it had left, and was loaded"
        assert [(each["granted"], each["tokens"], each["seconds"]) for each in granted] == [(True, cached, 0.0)]

        assert hint(server, model, 1, release={})[0]["granted"]
        assert server.metrics()["headrace_retained_pages"] == 0
        assert hint(server, model, 9, retain={"seconds": 1})[0]["reason"] == "the cache has no whole page of it"

        given, sampling = hints(retain={"seconds": 1}), {"max_new_tokens": 1}
        answer = server.post("/generate", {"input_ids": prompt(1), "sampling_params": sampling, "kv_hints": given})
        assert answer.json()["meta_info"]["kv_hints"][0]["granted"]
        body = {"token_ids": prompt(1), "sampling_params": {"max_tokens": 1}, "kv_hints": given}
        assert server.post("/inference/v1/generate", body).json()["kv_hints"][0]["granted"]


@pytest.mark.full
def test_a_pair_retains_on_both_sides() -> None:
    flags = ("--kv-pages", "600", "--max-model-len", "4352", "--page-size", "16", *STUB)
    with pair(flags, flags) as (prefill, decode):
        granted = ask(decode, "stub", 1, kv_hints=hints(retain={"seconds": 600}))[3]
        assert granted[0]["tokens"] == 960, "a tenth of the pool"
        wait_for(prefill, "headrace_retained_pages", 60)
        assert decode.metrics()["headrace_retained_pages"] == 60
