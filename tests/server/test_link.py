"""The channel to the scheduler over a real socket."""

import asyncio
from pathlib import Path

import zmq

from core.codec import Codec
from core.intake import Drained, IntakeMessage, OutputMessage, QueryStats, Shutdown, StatsReply
from core.stats import Stats
from server.link import ZmqSchedulerLink
from tests.server.fakes import in_loop


@in_loop
async def test_messages_go_both_ways_in_order_and_the_link_may_be_there_first(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    link = ZmqSchedulerLink(endpoint)
    taken: asyncio.Queue[OutputMessage] = asyncio.Queue()
    link.open(taken.put_nowait)
    for number in range(100):
        link.send(QueryStats(token=number))
    link.send(Shutdown())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    scheduler = context.socket(zmq.PAIR)
    scheduler.bind(endpoint)
    codec: Codec[IntakeMessage] = Codec(IntakeMessage)
    out: Codec[OutputMessage] = Codec(OutputMessage)

    def receive() -> list[IntakeMessage]:
        return [codec.decode(scheduler.recv()) for _ in range(101)]

    received = await asyncio.to_thread(receive)
    assert received == [*(QueryStats(token=number) for number in range(100)), Shutdown()]
    scheduler.send(out.encode(Drained()))
    assert await taken.get() == Drained()
    link.close()
    link.close()
    scheduler.close()
    context.term()


@in_loop
async def test_no_message_is_left_lying_while_both_sides_send(tmp_path: Path) -> None:
    """Sending may take the news of what has come from the descriptor."""
    endpoint, count = f"ipc://{tmp_path}/front", 3000
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    scheduler = context.socket(zmq.PAIR)
    scheduler.bind(endpoint)
    link = ZmqSchedulerLink(endpoint)
    out: Codec[OutputMessage] = Codec(OutputMessage)
    taken: list[OutputMessage] = []
    complete = asyncio.Event()

    def take(message: OutputMessage) -> None:
        taken.append(message)
        link.send(QueryStats(token=len(taken)))
        if len(taken) == count:
            complete.set()

    def answer() -> None:
        """One message at a time, and several at once."""
        for number in range(count):
            scheduler.send(out.encode(StatsReply(token=number, stats=Stats())))
            if number % 7 == 0:
                scheduler.recv()
        for _ in range(count - len(range(0, count, 7))):
            scheduler.recv()

    link.open(take)
    await asyncio.gather(asyncio.to_thread(answer), complete.wait())
    assert [message.token for message in taken if isinstance(message, StatsReply)] == list(range(count))
    link.close()
    scheduler.close()
    context.term()


@in_loop
async def test_a_message_that_cannot_be_handled_is_the_end_of_the_link(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    scheduler = context.socket(zmq.PAIR)
    scheduler.bind(endpoint)
    link = ZmqSchedulerLink(endpoint)
    link.open(lambda _message: None)
    scheduler.send(b"no message")
    while not link.failed:
        await asyncio.sleep(0.001)
    link.send(Shutdown())  # goes nowhere, and hurts nobody
    link.close()
    scheduler.close()
    context.term()
