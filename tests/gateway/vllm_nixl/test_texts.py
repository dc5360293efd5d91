"""Through the gateway a stock vLLM says what it says alone, and its own metric tells that it loaded the KV.

make test-vllm. float32, greedy. What vLLM computes itself has a cache_salt of its own, so that it is not read from
loaded blocks.
"""

import pytest

from tests.e2e import gold
from tests.gateway.vllm_nixl.fleet import Example, Site
from tests.gateway.vllm_nixl.texts import CHAT, COMPLETION, GREEDY, chat, check, loaded, none_computed, own
from tests.integrations.vllm.sides import loads, prompt
from tests.routers.fleet import Router, routed
from tests.routers.test_texts import texts

pytestmark = pytest.mark.vllm

LENGTHS = (1, 7, 127, 128, 129, 256, 300, 700, 2000)


@pytest.mark.parametrize("length", LENGTHS)
def test_completions_of_token_ids(site: Site, router: Router, length: int) -> None:
    check(site, router, COMPLETION, {"prompt": prompt(length)}, loaded(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_completions_of_texts(site: Site, router: Router, length: int) -> None:
    text = gold.tokenizer().decode(prompt(length, at=400))
    tokens = site.decode.client.post("/tokenize", json={"model": "smollm2", "prompt": text}).json()["count"]
    check(site, router, COMPLETION, {"prompt": text}, loaded(tokens))


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 20])  # the template alone has as many
def test_chats(site: Site, router: Router, length: int) -> None:
    check(site, router, CHAT, {"messages": chat(site.decode, length)}, length)


@pytest.mark.parametrize("length", [1, 129, 700])
def test_vllms_proxy_example(site: Site, length: int) -> None:
    """disagg_proxy_demo.py puts the host by which it knows the prefill side in the place of remote_host."""
    example = Example(site)
    check(site, example, COMPLETION, {"prompt": prompt(length, at=100)}, loaded(length))
    if length > 20:
        check(site, example, CHAT, {"messages": chat(site.decode, length), "max_completion_tokens": 9}, length)
    body = {**GREEDY, "prompt": prompt(length, at=110)}
    params = example.params(COMPLETION, body) | {"remote_host": "127.0.0.1"}
    with loads(site.decode, loaded(length)):
        answer = example.second(COMPLETION, {**body, "cache_salt": f"demo-{length}"}, params)
    assert texts(answer) == own(site.decode, COMPLETION, body)


def test_xpyd_proxy(site: Site) -> None:
    with routed("xpyd", site) as router:
        for length in (1, 300):
            check(site, router, COMPLETION, {"prompt": prompt(length, at=200)}, loaded(length))
        check(site, router, CHAT, {"messages": chat(site.decode, 256)}, 256)


@pytest.mark.parametrize("length", [128, 300])
def test_equal_prompts_are_loaded(site: Site, router: Router, length: int) -> None:
    ids = prompt(length, at=500)
    check(site, router, COMPLETION, {"prompt": [ids, ids, ids]}, 3 * length, none_computed)


@pytest.mark.parametrize("length", [128, 300])
def test_samples_of_a_prompt_are_loaded(site: Site, router: Router, length: int) -> None:
    """Each of them by itself: vLLM makes requests of them."""
    sampled = {"n": 2, "temperature": 0.8, "seed": 7}
    check(site, router, COMPLETION, {"prompt": prompt(length, at=550), **sampled}, 2 * length, none_computed)
    check(site, router, CHAT, {"messages": chat(site.decode, length), **sampled}, 2 * length, none_computed)


def test_different_prompts_are_computed_by_vllm(site: Site, router: Router) -> None:
    """One kv_transfer_params cannot name the blocks of several prompts."""
    prompts = [prompt(200, at=600), prompt(90, at=650)]
    before = site.recomputed("different_prompts")
    check(site, router, COMPLETION, {"prompt": prompts}, 0)
    assert site.recomputed("different_prompts") == before + 2, "whole and as a stream"


def test_what_vllm_has_cached_is_not_loaded(site: Site, router: Router) -> None:
    ids = prompt(300, at=700)
    site.decode.text(ids[:256], cache_salt="shared")
    body = {**GREEDY, "prompt": ids, "cache_salt": "shared"}
    with loads(site.decode, 300 - 256):
        assert texts(router.post(COMPLETION, body)) == own(site.decode, COMPLETION, body)


def test_what_was_loaded_serves_later_requests(site: Site, router: Router) -> None:
    ids = prompt(300, at=750)
    body = {**GREEDY, "prompt": ids, "cache_salt": "later"}
    with loads(site.decode, 300):
        first = texts(router.post(COMPLETION, body))
    with loads(site.decode, 0):
        assert texts(site.decode.client.post(COMPLETION, json=body)) == first == own(site.decode, COMPLETION, body)


def test_a_whole_prompt_in_vllms_cache_is_not_loaded(site: Site, router: Router) -> None:
    """vLLM then only gives notice; the pages of the gateway are free at once."""
    ids = prompt(256, at=800)
    body = {**GREEDY, "prompt": ids, "cache_salt": "whole"}
    first = texts(site.decode.client.post(COMPLETION, json=body))
    with loads(site.decode, 128):  # vLLM computes the last token, and so takes back the block that it is in
        assert texts(router.post(COMPLETION, body)) == first


def test_kv_of_another_prompt_changes_the_text(site: Site) -> None:
    """So what is loaded is what is used."""
    ids, other = prompt(300, at=850), prompt(300, at=1500)
    example = Example(site)
    params = example.params(COMPLETION, {**GREEDY, "prompt": other})
    with loads(site.decode, 300):
        wrong = texts(example.second(COMPLETION, {**GREEDY, "prompt": ids}, params))
    assert wrong != own(site.decode, COMPLETION, {**GREEDY, "prompt": ids})
