"""Prompts that several prefill servers finish, with NIXL between the servers: tests/e2e/test_resume.py over it.

A prefill server writes into the decode server's pages itself; what has come is used once it can do so no more.
"""

from collections.abc import Callable

import pytest

from headrace.core.types.kv.backends import NIXL
from tests.e2e.harness import Server
from tests.e2e.models import SMOLLM2, Model
from tests.e2e.test_resume import CHUNK, STUB, halted, killed, overtaken, strike, trio
from tests.transfer.backends.test_nixl_servers import written

pytestmark = pytest.mark.nixl

CHUNKS = 8


def struck(model: Model, blow: Callable[[Server], int], *flags: str) -> None:
    """Strike a server in the middle of a prompt: what it has sent by NIXL is used, and so is the pool."""
    with trio(model, "--transfer-backends", f"{NIXL},zmq", *flags) as fleet:  # zmq: to look at the KV
        victim, kept, _ = strike(fleet, 0, CHUNKS, blow)
        assert kept >= (CHUNKS - 1) * CHUNK
        assert written(fleet.sound(victim)) > 0
        assert fleet.decode.total("headrace_quarantined_pages") == 0


@pytest.mark.parametrize("model", [pytest.param(STUB, id="stub"), pytest.param(SMOLLM2, id="smollm2")])
def test_a_prompt_whose_server_is_killed_goes_on_at_another_one(model: Model) -> None:
    struck(model, killed)


def test_a_prompt_whose_server_stops_goes_on_at_another_one() -> None:
    """It may go on at any time, but its right to write is taken back."""

    def stopped(server: Server) -> int:
        halted(server)
        return CHUNKS * CHUNK  # or more

    struck(STUB, stopped, "--peer-timeout", "2")


def test_a_second_server_begins_a_late_prompt_from_the_start() -> None:
    """Pages that the first server writes itself are left to it."""
    assert overtaken(NIXL) == 0
