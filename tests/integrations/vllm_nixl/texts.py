"""Bodies, and what a vLLM makes of them alone and through a gateway."""

import os
from typing import Any

from benchmarks.vllm_server import NAME, Vllm
from tests.e2e import gold
from tests.integrations.vllm.sides import loads, prompt
from tests.integrations.vllm_nixl.fleet import Example, Site
from tests.routers.fleet import Router
from tests.routers.test_texts import streamed, texts

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def loaded(length: int) -> int:
    """Prompt tokens that vLLM counts as loaded. A sole token is computed again for its logits, and so counted."""
    return length if length > 1 else 0


def own(vllm: Vllm, path: str, body: dict[str, Any]) -> dict[int, str]:
    """What vLLM makes of a body alone."""
    answer = vllm.client.post(path, json={**body, "cache_salt": os.urandom(8).hex()})
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


def check(site: Site, through: Router | Example, path: str, body: dict[str, Any], tokens: int) -> None:
    """Whole and as a stream: the text is vLLM's own, and of so many loaded tokens."""
    body = {**GREEDY, **body}
    expected = own(site.decode, path, body)
    assert all(expected.values())
    for stream in (False, True):
        with loads(site.decode, tokens):
            answer = through.post(path, {**body, "stream": stream, "cache_salt": os.urandom(8).hex()})
            assert (streamed if stream else texts)(answer) == expected
