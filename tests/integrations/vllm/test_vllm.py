"""A stock vLLM takes its prompts' KV from a real prefill server: make test-vllm.

float32, greedy: what vLLM says with a ticket is what it says alone, and its own metric tells whether the KV came from
here.
"""

import time

import pytest

from benchmarks.vllm_server import Vllm
from headrace.core.types.packed import pack, prompt_hash
from tests.e2e.harness import Server, wait_until
from tests.integrations.vllm.sides import LEASE_S, background, hold, loads, named, post, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("nothing_leaks")]

LENGTHS = (1, 7, 127, 128, 129, 256, 300, 2000)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_held_ticket_gives_the_text_that_vllm_says_alone(vllm: Vllm, prefill: Server, length: int) -> None:
    ids = prompt(length)
    params = hold(prefill, f"held-{length}", ids)
    with loads(vllm, length if length > 1 else 0):  # a sole token is computed again for its logits, and so counted
        text = vllm.text(ids, params)
    assert text == vllm.alone(ids)


def test_a_pushed_ticket_may_be_asked_for_before_its_prompt_comes(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(700, at=50)
    with background() as pool, loads(vllm, len(ids)):
        asked = pool.submit(vllm.text, ids, named(prefill, "pushed"))
        wait_until(lambda: prefill.metrics()["headrace_reservations_waiting"] == 1, 10, "vLLM has reserved")
        pushed = post(prefill, "pushed", ids)
        assert pushed.status_code == 200, pushed.text
        text = asked.result()
    assert text == vllm.alone(ids)


def test_what_vllm_has_cached_is_not_sent(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(300, at=100)
    vllm.text(ids[:256], cache_salt="shared")
    params = hold(prefill, "rest", ids)
    with loads(vllm, 300 - 256):
        text = vllm.text(ids, params, cache_salt="shared")
    assert text == vllm.alone(ids)


def test_what_was_loaded_serves_later_requests_from_the_cache(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(300, at=150)
    with loads(vllm, 300):
        first = vllm.text(ids, hold(prefill, "seed", ids), cache_salt="seed")
    with loads(vllm, 0):
        assert vllm.text(ids, cache_salt="seed") == first == vllm.alone(ids)


def test_a_list_of_prompts_finds_its_tickets_by_their_hashes(vllm: Vllm, prefill: Server) -> None:
    prompts = [prompt(200), prompt(90, at=7)]
    for number, ids in enumerate(prompts):
        hold(prefill, f"list/{number}", ids)
    params = named(
        prefill,
        "list/0",
        tickets=["list/0", "list/1"],
        prompt_hashes=[prompt_hash(pack(ids)) for ids in prompts],
        remote_num_tokens=[len(ids) for ids in prompts],
    )
    with loads(vllm, 290):
        answer = vllm.complete(prompts, params)  # type: ignore[arg-type]
    assert [choice["text"] for choice in answer.json()["choices"]] == [vllm.alone(ids) for ids in prompts]


def test_several_samples_of_a_prompt_load_it_once(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(256, at=11)
    params = hold(prefill, "samples", ids)
    with loads(vllm, 256):
        answer = vllm.complete(ids, params, n=3, temperature=0.8, cache_salt="samples")
    assert len(answer.json()["choices"]) == 3


def test_sglangs_names_through_the_middleware(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(300, at=30)
    names = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "bootstrap_room": 77}
    with background() as pool, loads(vllm, 300):
        asked = pool.submit(vllm.text, ids, **names)
        assert post(prefill, "room:77", ids).status_code == 200
        text = asked.result()
    assert text == vllm.alone(ids) == vllm.text(ids, bootstrap_host="2.2.2.2", bootstrap_room=1)
    refused = vllm.complete(ids, bootstrap_host=["a", "b"], bootstrap_room=[1, 2])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bootstrap_room")


def test_a_waiting_request_keeps_its_lease(vllm: Vllm, prefill: Server) -> None:
    """More than one lease passes before vLLM has room for it."""
    ids = prompt(300, at=300)
    with background() as pool, loads(vllm, 300):
        busy = [pool.submit(vllm.complete, prompt(100, at=at), max_tokens=300) for at in range(4)]
        wait_until(lambda: vllm.metric("vllm:num_requests_running") == 4, 20, "no request of vLLM's is free")
        params = hold(prefill, "patient", ids)
        begin = time.monotonic()
        text = vllm.text(ids, params)
        waited = time.monotonic() - begin
        for one in busy:
            assert one.result().status_code == 200
    assert waited > LEASE_S, "or the test shows nothing"
    assert text == vllm.alone(ids)


@pytest.mark.parametrize("length", [1, 129, 2000])
def test_shards_of_a_prefill_server_send_their_heads(vllm: Vllm, sharded: Server, length: int) -> None:
    """Each of them over a connection of its own; vLLM has one pool with all heads."""
    ids = prompt(length, at=500)
    params = hold(sharded, f"sharded-{length}", ids)
    with loads(vllm, length if length > 1 else 0):
        text = vllm.text(ids, params)
    assert text == vllm.alone(ids)


@pytest.mark.parametrize("length", [129, 300])
def test_encrypted_kv_gives_the_same_text(strict: Vllm, guarded: Server, length: int) -> None:
    ids = prompt(length, at=400)
    params = hold(guarded, f"encrypted-{length}", ids)
    with loads(strict, length):
        text = strict.text(ids, params)
    assert text == strict.alone(ids)


@pytest.mark.parametrize("length", [7, 128, 300])
def test_kv_of_another_prompt_changes_the_text(strict: Vllm, guarded: Server, length: int) -> None:
    """So what is loaded is what is used."""
    ids, other = prompt(length), prompt(length, at=1000)
    params = hold(guarded, f"other-{length}", other)
    with loads(strict, length):
        text = strict.text(ids, params)
    assert text != strict.alone(ids)
