"""The channel to the scheduler over a real socket."""

import asyncio
from pathlib import Path

import zmq

from core.codec import Codec
from core.intake import Drained, IntakeMessage, OutputMessage, QueryStats, Shutdown
from server.link import ZmqSchedulerLink
from tests.server.fakes import in_loop


@in_loop
async def test_messages_go_both_ways_in_order_and_the_link_may_be_there_first(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    link = ZmqSchedulerLink(endpoint)
    await asyncio.gather(*(link.send(QueryStats(token=number)) for number in range(100)), link.send(Shutdown()))
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
    assert await anext(link.outputs()) == Drained()
    link.close()
    link.close()
    scheduler.close()
    context.term()
