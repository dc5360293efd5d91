"""Hidden states and tokens through host memory, over Gloo: the same bits as directly, and no wait for the device."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.parallel import carriers
from headrace.engine.parallel.carriers import StagedCarrier
from headrace.engine.parallel.pipeline import PipelineLinks
from tests.engine.parallel.test_pipeline_links import SPEC, plan, sampled, taken
from tests.engine.parallel.thread_world import World

TIMEOUT_S = 60.0
STAGES = 3
CPU = torch.device("cpu")


def processes(*arguments: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank."""
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    store.close()
    command = [sys.executable, "-m", "tests.engine.parallel.staged_rank", str(port), str(STAGES)]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(STAGES)
    ]
    try:
        found = [each.communicate(timeout=TIMEOUT_S) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    return [(each.returncode, *texts) for each, texts in zip(ranks, found, strict=True)]


def test_what_comes_is_what_was_sent_to_the_bit() -> None:
    for status, _, errors in processes():
        assert status == 0, errors


def test_a_killed_rank_breaks_the_links_of_the_others() -> None:
    first, killed, last = processes("dies")
    assert killed[0] == -9, killed
    for status, output, errors in (first, last):
        assert status == 0, errors
        assert output.startswith("broken: "), "LinkBroken, within the timeout of the group"


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with patch.object(carriers, "dist", made):
        yield made


class Copied:
    """The event behind a copy to the host."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(TIMEOUT_S)


def staged(world: World, rank: int, carrier: StagedCarrier) -> PipelineLinks:
    world.enter(rank)
    return PipelineLinks(Layout(2, 1, 1), rank, SPEC, "tokens", 4, carrier)  # type: ignore[arg-type]


def test_a_send_begins_when_the_copy_is_done_and_nothing_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, begun = Copied(), threading.Event()
    monkeypatch.setattr(carriers, "begin_host_copy", lambda tensor: (tensor, copied))
    isend = World.isend

    def begin(*given: Any, **named: Any) -> Any:
        begun.set()
        world.enter(0)  # in the thread that sends
        return isend(*given, **named)

    monkeypatch.setattr(World, "isend", begin)
    sender = staged(world, 0, StagedCarrier(CPU))
    sender.send(plan(1, 10), torch.zeros(1, 2))
    sender.send(plan(2, 11), torch.zeros(1, 2))
    assert not begun.wait(0.1), "what is not in host memory is not sent"
    copied.done.set()
    assert begun.wait(TIMEOUT_S)


def test_a_send_that_fails_breaks_the_link_at_its_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in a thread of its own; the compute thread is told when it waits for that send."""

    def isend(*_: object, **__: object) -> None:
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(World, "isend", isend)
    sender = staged(world, 0, StagedCarrier(CPU))
    for seq in range(1, 5):
        sender.send(plan(seq, 10), torch.zeros(1, 2))
    with pytest.raises(LinkBroken, match="connection reset by peer"):
        sender.send(plan(5, 10), torch.zeros(1, 2))


def test_tokens_of_the_last_stage_come_to_the_first(world: World) -> None:
    carrier = StagedCarrier(CPU)
    carrier._sending.submit(world.enter, 1).result()  # its thread is of that rank
    last = staged(world, 1, carrier)
    last.broadcast(plan(1, 10, 11), sampled((10, 100), (11, 110)))
    first = staged(world, 0, StagedCarrier(CPU))
    first.broadcast(plan(1, 10, 11), None)
    assert taken(first, 11) == [(10, 100), (11, 110)]
