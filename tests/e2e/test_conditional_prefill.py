"""--remote cost with real servers, one of which gets a quarter of a core: the slower one is avoided.

    core 0   the fast server
    core 1   the slow server, behind a program that computes all the time and has three times its share

Each server learns what computing takes it from its own forward passes: nothing tells them who is slow.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.core.types.requests.remote_prefill import PREFILL_REASONS
from tests.e2e.harness import Server, running, wait_until
from tests.e2e.models import NAME, SMOLLM2

TOKENS = 6
FLAGS = (*SMOLLM2.flags, "--threads", "1", "--chunk-tokens", "128", "--page-size", "16", "--kv-pages", "512")
NICE = 5  # of the slow server: a third of the share of others, however many there are on the machine
FIRST = slice(100, 700)  # the prompt by which the prefill server learns what computing takes it
REPORTED_S = 2.5  # a server's load is asked for every second

pytestmark = pytest.mark.full


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Processes that are started meanwhile run on this core of those that the test may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def neighbor() -> Iterator[None]:
    """Keep core 1 busy."""
    with on_core(1):
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def started(core: int, *flags: str) -> Server:
    """A server on this core. Its threads and processes inherit what its first thread has."""
    with on_core(core):
        server = Server(*flags, *FLAGS)
    if core == 1:
        os.setpriority(os.PRIO_PROCESS, server.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    return server


@contextmanager
def servers(prefill_core: int, decode_core: int) -> Iterator[tuple[Server, Server]]:
    """A prefill server, and a decode server of it that compares costs."""
    prefill = started(prefill_core, "--role", "prefill")
    decode = started(decode_core, "--role", "decode", "--prefill", prefill.url, "--remote", "cost")
    with running(prefill), running(decode):
        yield prefill, decode


def ask(decode: Server, prompt: tuple[int, ...]) -> str:
    """Have a prompt continued, whose text has to be that of the model. Returns why it was computed where it was."""
    before = decisions(decode)
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
    answer = decode.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == SMOLLM2.greedy_text(prompt, TOKENS)
    (reason,) = (reason for reason, count in decisions(decode).items() if count > before[reason])
    return reason


def prompts(*parts: slice) -> list[tuple[int, ...]]:
    """Parts of the story. What the model says after them is computed now, while nothing else runs."""
    found = [SMOLLM2.story()[part] for part in (FIRST, *parts)]
    for prompt in found:
        SMOLLM2.greedy_text(prompt, TOKENS)
    return found[1:]


def decisions(decode: Server) -> dict[str, float]:
    """Prompts by reason."""
    found = decode.metrics()
    return {reason: found[f'headrace_prefill_decisions_total{{reason="{reason}"}}'] for reason in PREFILL_REASONS}


def computed(prefill: Server) -> float:
    """Prompt tokens that a server has computed or is computing."""
    return prefill.total("headrace_prompt_tokens_total")


def unequal(slow: Server, fast: Server) -> None:
    """Skip on a machine that is so busy that both servers are as slow."""
    name = 'headrace_prefill_cost_seconds{per="token"}'
    if slow.metrics()[name] < 2.5 * fast.metrics()[name]:
        pytest.skip("the machine is busy with other things: the slow server is hardly slower than the fast one")


def known(prefill: Server, decode: Server) -> None:
    """Have the prefill server compute its first prompt, and wait until the decode server knows what that has taken."""
    assert ask(decode, SMOLLM2.story()[FIRST]) == "unknown_cost"
    wait_until(lambda: prefill.get("/v1/handoff").json()["load"]["trusted"], 10, "a cost model")
    time.sleep(REPORTED_S)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_slow_prefill_server_is_avoided() -> None:
    *new, turn = prompts(slice(0, 400), slice(1000, 1400), slice(2000, 2400), slice(2000, 2410))
    with neighbor(), servers(prefill_core=1, decode_core=0) as (prefill, decode):
        known(prefill, decode)
        unequal(prefill, decode)
        before = computed(prefill)
        assert [ask(decode, prompt) for prompt in new] == ["cheaper_here"] * 3
        assert ask(decode, turn) == "cached_here"
        assert computed(prefill) == before, "it got no prompt"
        assert "prefill=cached_here" in decode.log


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_fast_prefill_server_is_used_and_cached_prompts_stay() -> None:
    *long, turn = prompts(slice(1000, 1600), slice(2000, 2600), slice(2000, 2604))
    with neighbor(), servers(prefill_core=0, decode_core=1) as (prefill, decode):
        known(prefill, decode)
        unequal(decode, prefill)
        before = computed(prefill)
        assert [ask(decode, prompt) for prompt in long] == ["cheaper_there"] * 2
        assert computed(prefill) == before + 1200
        assert ask(decode, turn) == "cached_here"
        assert computed(prefill) == before + 1200
