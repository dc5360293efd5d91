"""Connections that have been closed or broken: the next one with the same descriptor is told apart from them, and no
process ends with them."""

import subprocess
import sys
from typing import Any

import pytest

from headrace.core.config import TransferConfig
from headrace.core.stats import Stats
from headrace.transfer.sockets.connections import Connection, Connections
from headrace.transfer.sockets.listener import CLOSE_S, Listener
from headrace.transfer.sockets.zmq_sockets import bind
from tests.transfer.harness import value
from tests.transfer.plain import RUBBISH, Plain


def test_a_connection_does_not_pay_for_the_one_that_had_its_descriptor_before(context: Any) -> None:
    """What a closed connection has said may be read when the next one stands: only their names tell the two apart."""
    config = TransferConfig()
    listener = Listener(config, context, "test", port=0, max_frame=1 << 14, queue=100, unread=1000)
    now = 0.0

    def turn(after_s: float) -> None:
        nonlocal now
        now += after_s
        for arrival in listener.receive(now):
            if arrival.body == [RUBBISH]:
                listener.refuse(arrival, b"no", now)

    for _ in range(20):
        with Plain(listener.port) as first:
            first.say(RUBBISH, 200)
        with Plain(listener.port) as second:
            turn(0.0)
            second.say(b"hello")
            assert listener.socket.poll(5000)
            turn(0.0)
            turn(2 * CLOSE_S)
            assert not second.closed
    with Plain(listener.port) as first:
        first.say(RUBBISH, 200)
        assert listener.socket.poll(5000)
        turn(0.0)
        assert listener.next_deadline() == now + CLOSE_S
        turn(CLOSE_S)
        first.heard()
    listener.close()


def test_a_descriptor_that_is_used_again_is_another_connection(context: Any) -> None:
    """Descriptors are given out again at once: what was meant for a connection that is closed must not hit the next."""
    watched = Connections(context, "test")
    router, port = bind(context, "127.0.0.1", 0, max_frame=100, queue=10, prepare=watched.watch)

    def heard(peer: Plain) -> Connection:
        peer.say(b"hello")
        assert router.poll(5000)
        found = watched.of(router.recv_multipart(copy=False)[-1])
        assert found is not None
        return found

    def again() -> bool:
        with Plain(port) as peer:
            new = heard(peer)
            if new.descriptor != old.descriptor:
                return False
            watched.close_one(old, "unread", 0.0)
            assert heard(peer) == new, "it stands"
            watched.close_one(new, "unread", 0.0)
            watched.close_one(new, "unread", 0.0)
            peer.heard()
            return True

    with Plain(port) as first:
        old = heard(first)
    assert any(again() for _ in range(100))
    assert value(Stats(watched.statistics()), "connections_closed_total", ("test", "unread")) == 1
    watched.close()
    router.close()


SLEEPER = """
import sys, time, zmq
from headrace.core.config import TransferConfig
from headrace.server.launch.stage_connections import bound_port, order_socket
from headrace.transfer.sockets.connections import Connections
from headrace.transfer.sockets.listener import Listener
context = zmq.Context()
if sys.argv[1] == "data":
    config = TransferConfig(peer_timeout_s=0.6)
    listener = Listener(config, context, "data", port=0, max_frame=1 << 14, queue=100, unread=100)
    socket, port = listener.socket, listener.port
else:
    connections = Connections(context, "stages")
    socket = order_socket(context, "tcp://127.0.0.1:*", connections.watch, 0.6)
    port = bound_port(socket)
print(port, flush=True)
if socket.poll(5000):  # libzmq shows what it has taken in when it takes in no more
    print("full", flush=True)
sys.stdin.readline()
taken = 0
while socket.poll(200):
    socket.recv_multipart()
    taken += 1
print(taken, flush=True)
"""


@pytest.mark.parametrize("which", ["data", "stages"])
def test_a_connection_that_breaks_while_its_queue_is_full_ends_no_process(which: str) -> None:
    """libzmq aborts where ZMTP heartbeats are on: this process reads nothing for longer than one would take."""
    command = [sys.executable, "-c", SLEEPER, which]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        peer = Plain(int(process.stdout.readline()))
        peer.say(b"hello", 2000)
        assert process.stdout.readline() == "full\n"
        peer.reset()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        print(file=process.stdin, flush=True)
        assert int(process.stdout.readline()) >= 100
