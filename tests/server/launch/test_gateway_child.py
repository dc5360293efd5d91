"""The gateway that a prefill server starts: started again when it ends, drained by SIGTERM, killed at the end."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.config import GatewayConfig
from headrace.server.launch import child_process
from headrace.server.launch.child_process import GatewayChild
from tests.server.fakes import in_loop

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that waits until it is told to end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a child inherits that it is ignored
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(child_process, "GATEWAY_MODULE", "tests.server.launch.child")
    monkeypatch.setattr(child_process, "FIRST_PAUSE_S", 0.01)
    yield
    signal.signal(signal.SIGTERM, before)


async def running(gateway: GatewayChild, other_than: int = 0) -> int:
    """Its process id, once there is one."""
    while True:
        child = gateway._child
        if child is not None and child.running and child.pid != other_than:
            return child.pid
        await asyncio.sleep(0.01)


@in_loop
async def test_it_is_started_again_and_drained(caplog: pytest.LogCaptureFixture) -> None:
    gateway = GatewayChild(GatewayConfig())
    gateway.start()
    first = await running(gateway)
    assert gateway._child is not None
    await gateway._child.kill()
    await running(gateway, other_than=first)
    assert "the gateway has ended with status -9; starting it again in 0.01 s" in caplog.text
    second = gateway._child
    await gateway.drain()
    assert second.running is False
    await asyncio.sleep(0.1)
    assert gateway._child is second, "it is not started again"


@in_loop
async def test_it_is_killed_at_the_end() -> None:
    gateway = GatewayChild(GatewayConfig())
    await gateway.kill()
    gateway.start()
    await running(gateway)
    child = gateway._child
    await gateway.kill()
    assert child is not None
    assert await child.wait() == -9
