"""SGLang's router, from its package, before the gateway and a stock engine: make test-sglang."""

from collections.abc import Iterator

import pytest

from tests.gateway.sglang_engine.engine import answered
from tests.gateway.sglang_engine.site import TIMEOUT_S, Site
from tests.gateway.sglang_engine.test_texts import (
    CHAT,
    COMPLETION,
    GENERATE,
    GREEDY,
    MESSAGES,
    chat_ids,
    expected,
    generate,
)
from tests.integrations.vllm.sides import prompt
from tests.routers.fleet import Router, routed
from tests.routers.test_texts import streamed, texts

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", params=["sglang", "sglang-mini-lb"])
def router(site: Site, request: pytest.FixtureRequest) -> Iterator[Router]:
    with routed(request.param, site) as made:
        yield made


def test_texts(router: Router, site: Site) -> None:
    for length in (1, 40, 300):
        ids = prompt(length, at=20 + length)
        answer = answered(router.post(GENERATE, generate(ids), TIMEOUT_S))
        assert answer["text"] == expected(ids)
    body = {**GREEDY, "prompt": "The capital of France is"}
    text = texts(router.post(COMPLETION, body, TIMEOUT_S))
    assert streamed(router.post(COMPLETION, {**body, "stream": True}, TIMEOUT_S)) == text
    body = {**GREEDY, "messages": MESSAGES}
    assert texts(router.post(CHAT, body, TIMEOUT_S)) == {0: expected(chat_ids())}
    assert streamed(router.post(CHAT, {**body, "stream": True}, TIMEOUT_S)) == {0: expected(chat_ids())}


def test_what_is_refused_is_answered_soon(router: Router, site: Site) -> None:
    """The router waits for the engine's answer, too."""
    answer = router.post(COMPLETION, {**GREEDY, "prompt": "x", "n": 2}, 60)
    assert answer.status_code >= 400, answer.text
    answer = router.post(COMPLETION, {**GREEDY, "prompt": "One goes on", "model": "anything"}, TIMEOUT_S)
    assert answer.status_code == 200, answer.text
