"""The channel to the scheduler over a real socket pair."""

import asyncio
import logging
import socket

import pytest

from headrace.core.messages.frontend import AnyFrontendRequest, QueryStats, Shutdown
from headrace.core.messages.replies import AnySchedulerReply, Drained, StatsReply
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import FrameSocket
from headrace.core.stats import Stats
from headrace.server.frontend.link.scheduler_link import SocketLink
from tests.server.fakes import in_loop


def ends() -> tuple[SocketLink, FrameSocket]:
    ours, theirs = socket.socketpair()
    return SocketLink(FrameSocket(ours)), FrameSocket(theirs)


def unexpected() -> None:
    raise AssertionError("the connection has ended")


async def received(scheduler: FrameSocket, count: int) -> list[AnyFrontendRequest]:
    codec: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
    messages: list[AnyFrontendRequest] = []
    while len(messages) < count:
        await asyncio.sleep(0)
        messages += map(codec.decode, scheduler.receive())
    return messages


@in_loop
async def test_messages_go_both_ways_in_order() -> None:
    link, scheduler = ends()
    taken: asyncio.Queue[AnySchedulerReply] = asyncio.Queue()
    for number in range(100):  # before the other end receives
        link.send(QueryStats(token=number))
    link.open(taken.put_nowait, unexpected)
    link.send(Shutdown())
    assert await received(scheduler, 101) == [*(QueryStats(token=number) for number in range(100)), Shutdown()]
    scheduler.send(Codec[AnySchedulerReply](AnySchedulerReply).encode(Drained()))
    assert await taken.get() == Drained()
    link.close()
    link.close()
    scheduler.close()


@in_loop
async def test_messages_that_a_busy_scheduler_does_not_read_are_sent_later() -> None:
    link, scheduler = ends()
    link.open(lambda _message: None, unexpected)
    count = 20_000  # far more than the kernel keeps
    for number in range(count):
        link.send(QueryStats(token=number))
    assert [message.token for message in await received(scheduler, count) if isinstance(message, QueryStats)] == list(
        range(count)
    )
    link.close()
    scheduler.close()


@in_loop
async def test_messages_that_are_sent_while_others_arrive() -> None:
    link, scheduler = ends()
    out: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
    taken: list[int] = []

    def take(message: AnySchedulerReply) -> None:
        assert isinstance(message, StatsReply)
        taken.append(message.token)
        link.send(QueryStats(token=message.token))

    link.open(take, unexpected)
    for number in range(3000):
        scheduler.send(out.encode(StatsReply(token=number, stats=Stats())))
    back: list[AnyFrontendRequest] = []
    codec: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
    while len(back) < 3000:
        scheduler.flush()
        await asyncio.sleep(0)
        back += map(codec.decode, scheduler.receive())
    assert taken == list(range(3000)) == [message.token for message in back if isinstance(message, QueryStats)]
    link.close()
    scheduler.close()


@pytest.mark.parametrize("end", ["rubbish", "closed"])
def test_the_link_fails_when_the_scheduler_is_gone_or_sends_garbage(end: str, caplog: pytest.LogCaptureFixture) -> None:
    @in_loop
    async def run() -> None:
        link, scheduler = ends()
        losses: list[bool] = []
        link.open(lambda _message: None, lambda: losses.append(link.failed))
        if end == "rubbish":
            scheduler.send(b"no message")
        else:
            scheduler.close()
        while not link.failed:
            await asyncio.sleep(0.001)
        link.send(Shutdown())  # is ignored
        link.close()
        scheduler.close()
        assert losses == [True]

    with caplog.at_level(logging.ERROR):
        run()
    assert bool(caplog.records) == (end == "rubbish"), "an end is the supervisor's news"
