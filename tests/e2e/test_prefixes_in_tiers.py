"""Prefixes that a sibling has in its tiers: loaded there, fetched, and of the bits that computing gives; damaged pages,
dead holders, and the header by which a router names one."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from headrace.integrations.http_client import direct_client
from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, serving, wait_until
from tests.e2e.test_kv_hints import hints
from tests.e2e.test_kv_library import bake
from tests.e2e.test_prefixes import MODEL, PAGE, PROMPT, bits, dropped, sibling_up, slow, start, struck

WHOLE = len(PROMPT) // PAGE * PAGE
HOST_TIER = ("--host-pages", "500")
HOLDER_HEADER = "x-kv-cache-source-host-port"

pytestmark = pytest.mark.full


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def disk_tier(folder: Path) -> tuple[str, ...]:
    return "--disk-path", str(folder / "kv"), "--disk-admission-turn", "0"


def demote(server: Server, prompt: list[int]) -> None:
    """Have the pages of a prompt in the host tier alone."""
    body = {"prompt_token_ids": prompt, "kv_hints": hints(demote={})}
    (granted,) = server.post("/v1/kv_hints", body).json()["kv_hints"]
    assert granted["granted"], granted
    wait_until(lambda: held(server, prompt).get("device") == 0, 20, "the pages have left the pool")


def held(server: Server, prompt: list[int]) -> dict[str, int]:
    """What a server says to have of a prompt, by tier."""
    return dict(server.post("/v1/prefixes", {"prompt_token_ids": prompt}).json().get("cached_tokens_details", {}))


def with_sibling(stack: ExitStack, *holders: Server) -> Server:
    """A prefill server with these siblings, which knows what computing takes: so long that fetches have time."""
    named = [flag for holder in holders for flag in ("--sibling", holder.url)]
    server = start(stack, *slow(3000), "--role", "prefill", *named)
    wait_until(lambda: server.metrics()["headrace_prefill_servers_up"] == len(holders), 20, "the siblings are up")
    dropped(server, [3, *PROMPT[:200]])
    return server


def fetches(server: Server, result: str) -> float:
    return server.metrics().get(f'headrace_prefix_fetches_total{{result="{result}",source="sibling"}}', 0.0)


def loaded(server: Server, tier: str) -> float:
    return server.metrics()[f'headrace_kv_tier_hit_tokens_total{{tier="{tier}"}}']


def test_what_was_demoted_is_loaded_for_a_sibling(servers: ExitStack) -> None:
    first = start(servers, "--role", "prefill", *HOST_TIER)
    second = with_sibling(servers, first)
    before = dropped(first, PROMPT)
    demote(first, PROMPT)
    answer = first.post("/v1/prefixes", {"prompt_token_ids": PROMPT}).json()
    assert answer == {
        "cached_tokens": WHOLE,
        "cached_tokens_details": {"device": 0, "host": WHOLE, "disk": 0},
        "load_seconds": 0.0,
    }
    found = dropped(second, PROMPT)
    assert (found["first_token"], found["usage"]["cached_tokens"]) == (before["first_token"], WHOLE)
    assert (fetches(second, "fetched"), loaded(first, "host")) == (1, WHOLE)
    assert held(first, PROMPT) == {}, "it is in the pool there"
    assert pages_in_use(first) == pages_in_use(second) == 0


def test_a_holder_that_has_just_started_loads_from_its_disk(servers: ExitStack, tmp_path: Path) -> None:
    with ExitStack() as before:
        computed = dropped(start(before, "--role", "prefill", *disk_tier(tmp_path)), PROMPT)
    first = start(servers, "--role", "prefill", *disk_tier(tmp_path))
    second = with_sibling(servers, first)
    assert held(first, PROMPT) == {"device": 0, "host": 0, "disk": WHOLE}
    found = dropped(second, PROMPT)
    assert (found["first_token"], found["usage"]["cached_tokens"]) == (computed["first_token"], WHOLE)
    assert (fetches(second, "fetched"), loaded(first, "disk")) == (1, WHOLE)


def test_a_page_that_was_damaged_on_disk_shortens_the_prefix(servers: ExitStack, tmp_path: Path) -> None:
    with ExitStack() as before:
        computed = dropped(start(before, "--role", "prefill", *disk_tier(tmp_path)), PROMPT)
    first = start(servers, "--role", "prefill", *disk_tier(tmp_path))
    second = with_sibling(servers, first)
    flip_in_the_middle(tmp_path)
    found = dropped(second, PROMPT)
    assert found["first_token"] == computed["first_token"]
    assert 0 < found["usage"]["cached_tokens"] < WHOLE
    assert (fetches(second, "failed"), fetches(second, "fetched")) == (1, 1)
    assert first.total("headrace_stage_tier_failures_total") == 1
    assert dropped(second, PROMPT)["usage"]["cached_tokens"] == WHOLE, "it has computed the rest"
    assert pages_in_use(first) == pages_in_use(second) == 0


def flip_in_the_middle(folder: Path) -> None:
    """Flip a byte in the middle of what a disk tier has written."""
    path = max((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_blocks)
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))
    with path.open("r+b") as file:
        file.seek(end // 2)
        file.write(bytes([content[end // 2] ^ 0xFF]))


@pytest.mark.parametrize("killed", [True, False])
def test_a_holder_that_dies_or_hangs_while_it_loads_costs_no_request(servers: ExitStack, killed: bool) -> None:
    first = servers.enter_context(closing(Server(*MODEL, *slow(3000), "--role", "prefill", *HOST_TIER))).started()
    second = with_sibling(servers, first)
    before = dropped(first, PROMPT)
    demote(first, PROMPT)
    found = struck(first, second, lambda: dropped(second, PROMPT), killed=killed)
    assert (found["first_token"], found["usage"]["cached_tokens"]) == (before["first_token"], 0)
    assert fetches(second, "failed" if killed else "late") == 1
    if not killed:
        first.child("headrace.engine.stage").resume()
        wait_until(lambda: pages_in_use(first) == 0, 20, "pages are back at the holder")
        assert held(first, PROMPT) == {}, "what it was loading is in its pool"
        assert first.end() == 0
    wait_until(lambda: pages_in_use(second) == 0, 20, "pages are back")


@pytest.mark.parametrize("tier", ["host", "disk", "library"])
def test_behind_a_prefix_from_a_tier_are_the_bits_of_computing(servers: ExitStack, tier: str, tmp_path: Path) -> None:
    flags = ("--max-model-len", "2048", "--kv-pages", "256", "--page-size", "16", "--threads", "1")
    prompt, other = list(gold.story_ids()[:600]), list(gold.story_ids()[700:900])
    with serving("--no-prefix-cache", "--chunk-tokens", "64", *flags) as alone:
        expected = bits(alone, prompt)
    if tier == "library":
        (tmp_path / "files").mkdir()
        bake(tmp_path / "files" / "story.kv", prompt, (*flags, "--dtype", "float32"))
        holding = ("--kv-library", str(tmp_path / "files"))
    else:
        holding = HOST_TIER if tier == "host" else disk_tier(tmp_path)
    if tier == "disk":
        with serving("--role", "prefill", *holding, *flags) as server:
            dropped(server, prompt)
    first = servers.enter_context(serving("--role", "prefill", *holding, *flags))
    second = servers.enter_context(serving("--role", "prefill", "--sibling", first.url, *flags))
    decode = servers.enter_context(serving("--role", "decode", "--prefill", second.url, *flags))
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    if tier == "host":
        dropped(first, prompt)
        demote(first, prompt)
    wait_until(lambda: held(first, prompt).get(tier) == 592, 30, "the tier holds it")
    dropped(second, other)  # it knows what computing takes
    assert bits(decode, prompt) == expected
    assert second.metrics()['headrace_prefix_fetched_tokens_total{source="sibling"}'] == 592
    assert loaded(first, tier) == 592


def named(server: Server, prompt: list[int], holder: str) -> dict[str, Any]:
    """Have a server compute a prompt of which a router says who holds a prefix."""
    body = {"prompt_token_ids": prompt, "handoff": "none", "temperature": 0}
    with direct_client(timeout=60.0) as client:
        answer = client.post(f"{server.url}/v1/prefill", json=body, headers={HOLDER_HEADER: holder})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_router_names_the_sibling_that_is_asked(servers: ExitStack) -> None:
    """The most tokens are elsewhere each time, so that without the header they came from there."""
    prompts = [[seed, *PROMPT] for seed in range(100, 104)]
    most = start(servers, "--role", "prefill")
    fewer = servers.enter_context(closing(Server(*MODEL, "--role", "prefill"))).started()
    second = with_sibling(servers, most, fewer)
    for prompt in prompts[:3]:
        dropped(most, prompt)
    for prompt in prompts:
        dropped(fewer, prompt[:650])

    found = named(second, prompts[0], fewer.url.removeprefix("http://"))
    assert found["usage"]["cached_tokens"] == 640, "from the one that was named"
    assert found["first_token"] == dropped(most, prompts[0])["first_token"]

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.5)
        found = named(second, prompts[1], f"127.0.0.1:{stranger.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            stranger.accept()
    assert found["usage"]["cached_tokens"] == WHOLE, "as without the header"
    assert named(second, prompts[2], "not an address")["usage"]["cached_tokens"] == WHOLE

    address = fewer.url.removeprefix("http://")
    fewer.kill()
    found = named(second, prompts[3], address)
    assert found["usage"]["cached_tokens"] == 0, "nobody else has it: it is computed"
    assert found["first_token"] == dropped(most, prompts[3])["first_token"]
    assert pages_in_use(second) == 0
