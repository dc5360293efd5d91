"""Bodies, and what a vLLM makes of them alone and through a gateway."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.vllm_server import NAME, Vllm
from tests.e2e import gold
from tests.e2e.harness import wait_until
from tests.gateway.vllm_nixl.fleet import Example, Site
from tests.integrations.vllm.sides import loads, prompt
from tests.routers.fleet import Router
from tests.routers.test_texts import streamed, texts

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def loaded(length: int) -> int:
    """Prompt tokens that vLLM counts as loaded. A sole token is computed again for its logits, and so counted."""
    return length if length > 1 else 0


def fresh(body: dict[str, Any]) -> dict[str, Any]:
    """The same body, of which vLLM has nothing in its cache."""
    return {**body, "cache_salt": os.urandom(8).hex()}


def own(vllm: Vllm, path: str, body: dict[str, Any]) -> dict[int, str]:
    """What vLLM makes of a body alone."""
    answer = vllm.client.post(path, json=fresh(body))
    return texts(answer)


def chat(vllm: Vllm, length: int) -> list[dict[str, str]]:
    """A conversation whose prompt has so many tokens."""
    for content in range(length, 0, -1):
        text = gold.tokenizer().decode(prompt(content, at=900))
        messages = [{"role": "system", "content": "Go on."}, {"role": "user", "content": text}]
        count = vllm.client.post("/tokenize", json={"model": NAME, "messages": messages}).json()["count"]
        if count == length:
            return messages
    raise AssertionError(f"no conversation has {length} tokens")


@contextmanager
def none_computed(vllm: Vllm, tokens: int) -> Iterator[None]:
    """As many tokens of prompts are loaded, or found in the cache, as vLLM would have to compute otherwise."""
    names = ("external_kv_transfer", "local_cache_hit")
    time.sleep(0.5)  # the metric is behind by a step
    taken = lambda: sum(vllm.metric("vllm:prompt_tokens_by_source_total", name) for name in names)  # noqa: E731
    before = taken()
    yield
    wait_until(lambda: taken() - before >= tokens, 5, f"{tokens} tokens, {taken() - before}")
    assert taken() - before == tokens
    assert vllm.loaded_tokens() > 0


Count = Callable[[Vllm, int], AbstractContextManager[None]]


def check(
    site: Site, through: Router | Example, path: str, body: dict[str, Any], tokens: int, count: Count = loads
) -> None:
    """Whole and as a stream: the text is vLLM's own, and of so many loaded tokens."""
    body = {**GREEDY, **body}
    expected = own(site.decode, path, body)
    assert all(expected.values())
    for stream in (False, True):
        with count(site.decode, tokens):
            answer = through.post(path, fresh({**body, "stream": stream}))
            assert (streamed if stream else texts)(answer) == expected
