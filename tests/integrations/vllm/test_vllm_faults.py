"""What a stock vLLM does about a ticket that it cannot have, and what is left of it on both sides: make test-vllm."""

import contextlib
import threading
import time
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from benchmarks.vllm_server import Vllm
from tests.e2e.harness import Server, serving, wait_until
from tests.integrations.vllm.sides import (
    FLAGS,
    LEASE_S,
    Curve,
    background,
    hold,
    leave,
    loads,
    named,
    post,
    prompt,
    says,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("nothing_leaks")]


@pytest.mark.parametrize("length", [1, 128, 300])
def test_kv_of_another_prompt_is_refused(vllm: Vllm, prefill: Server, length: int) -> None:
    ids, other = prompt(length), prompt(length, at=1000)
    params = hold(prefill, f"refused-{length}", other)
    with loads(vllm, 0), says(vllm, "the peer has another prompt"):
        assert vllm.text(ids, params) == vllm.alone(ids)


@pytest.mark.parametrize("more", [
    {"remote_num_tokens": 41}, {"prompt_hashes": ["0" * 64]}, {"fingerprint": "another"}, {"ticket": 7},
    {"ticket": "unknown", "wait": False}, {"remote_host": "10.1.2.3"}, {"remote_port": 1}, {"remote_port": None},
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_computed_here(vllm: Vllm, prefill: Server, more: dict[str, Any]) -> None:
    ids = prompt(40, at=60)
    params = hold(prefill, f"unfit-{time.monotonic_ns()}", ids) | more
    with loads(vllm, 0):
        assert vllm.text(ids, params) == vllm.alone(ids)


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--model", "stub")], ids=str)
def test_another_model_or_dtype_is_refused_at_hello(vllm: Vllm, flags: tuple[str, str]) -> None:
    ids = prompt(128, at=70)
    code = f"{'dtype' if flags[0] == '--dtype' else 'fingerprint'}_mismatch"
    with serving("--role", "prefill", *flags) as other, loads(vllm, 0), says(vllm, f"unfit: {code}"):
        assert vllm.text(ids, hold(other, "t", [1] * 128)) == vllm.alone(ids)


def test_a_prefill_server_whose_keys_vllm_lacks(vllm: Vllm, guarded: Server) -> None:
    ids = prompt(128, at=75)
    params = hold(guarded, "locked", ids)
    with loads(vllm, 0), says(vllm, "--curve-server-key"):
        assert vllm.text(ids, params) == vllm.alone(ids)


def test_a_lease_that_has_ended(vllm: Vllm, strict: Vllm, prefill: Server, guarded: Server) -> None:
    """recompute: the same text. fail: HTTP 500."""
    ids = prompt(256, at=80)
    params = [hold(server, "late", ids) for server in (prefill, guarded)]
    time.sleep(LEASE_S + 0.5)
    with loads(vllm, 0), says(vllm, "lease_expired"):
        assert vllm.text(ids, params[0]) == vllm.alone(ids)
    with loads(strict, 0), says(strict, "lease_expired"):
        assert strict.complete(ids, params[1]).status_code == 500
    assert strict.text(ids) == vllm.alone(ids)


def test_the_prefill_server_dies_in_the_middle(vllm: Vllm, strict: Vllm, curve: Curve) -> None:
    """recompute: the same text. fail: HTTP 500, and the next request is served."""
    ids = prompt(1000, at=90)
    plain = vllm.alone(ids)
    for server, flags in ((vllm, ()), (strict, curve.flags)):
        victim = Server(*FLAGS, "--chunk-tokens", "128", *flags).started()
        with background() as pool, says(server, "is not loaded"):
            asked = pool.submit(server.complete, ids, named(victim, "doomed"))
            pool.submit(_posted, victim, ids)
            wait_until(lambda: victim.metrics()["headrace_chunks_sent_total"] > 1, 30, "some of it has come")  # noqa: B023
            victim.kill()
            answer = asked.result()
        if server is vllm:
            assert answer.json()["choices"][0]["text"] == plain
        else:
            assert answer.status_code == 500
    assert strict.text(ids) == plain


def _posted(server: Server, ids: list[int]) -> None:
    with contextlib.suppress(httpx.TransportError):  # it was killed
        post(server, "doomed", ids)


@pytest.mark.parametrize("computing", [False, True], ids=["waiting", "computing"])
def test_the_client_leaves_in_the_middle(vllm: Vllm, prefill: Server, computing: bool) -> None:
    ids, short = prompt(2000, at=200), prompt(60, at=200)
    said = vllm.text(short)
    ticket = f"left-{computing}"
    pushed: Future[httpx.Response] | None = None
    with background() as pool:
        stream = threading.Event()
        body = {"model": "smollm2", "prompt": ids, "temperature": 0, "max_tokens": 8}
        leaving = pool.submit(leave, vllm.url, {**body, "kv_transfer_params": named(prefill, ticket)}, stream)
        wait_until(lambda: prefill.metrics()["headrace_reservations_waiting"] == 1, 10, "vLLM has reserved")
        if computing:
            before = prefill.metrics()["headrace_chunks_sent_total"]
            pushed = pool.submit(post, prefill, ticket, ids)
            wait_until(lambda: prefill.metrics()["headrace_chunks_sent_total"] > before, 30, "some of it has come")
        stream.set()
        leaving.result()
        wait_until(lambda: prefill.metrics()["headrace_reservations_waiting"] == 0, 5, "the reservation is gone")
        if pushed is not None:
            assert pushed.result().status_code == 499, pushed.result().text
    wait_until(vllm.idle, 10, "vLLM has let go")
    assert vllm.text(short) == said
