"""KV that is offered to prefill servers which do not take it, now or at all."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.generation.kv_returns import KvReturns
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_server import PrefillServer
from tests.server.fakes import in_loop

PAGE = 16
PROMPT, ANSWER = range(40), range(40, 80)


class Client:
    """A scheduler whose prefix cache has all of every turn."""

    server_info = SimpleNamespace(control_port=5555)

    async def query_prefix(self, _prompt: bytes, _terms: RequestTerms, _timeout_s: float) -> Any:
        return SimpleNamespace(cached=len(PROMPT) + len(ANSWER))


class Refusing:
    """Prefill servers that answer every offer with an error, or not at all."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked = 0

    async def ask(self, *_request: Any) -> bytes:
        self.asked += 1
        if not self.status:
            raise TimeoutError
        raise HeadraceError(ErrorInfo(code="c", message="no", status=self.status))


@pytest.mark.parametrize(("status", "pause_s"), [(403, 60), (404, 60), (0, 60), (503, 5), (429, 5)])
@in_loop
async def test_who_does_not_take_it_is_asked_again_after_a_while(status: int, pause_s: float) -> None:
    clock, pool, metrics = VirtualClock(), Refusing(status), FrontMetrics()
    server = PrefillServer("http://p1:8001")
    client: Any = Client()
    returns = KvReturns(client, pool, metrics, clock, PAGE)  # type: ignore[arg-type]

    async def offer() -> int:
        returns.offer(server, PROMPT, ANSWER, RequestTerms())
        for _ in range(5):
            await asyncio.sleep(0)
        return pool.asked

    assert await offer() == 1
    clock.advance(pause_s - 0.1)
    assert await offer() == 1
    clock.advance(0.2)
    assert await offer() == 2
    await returns.stop()
