"""Polling of sockets that change between calls."""

import select
import socket

import zmq

from headrace.core.runtime.event_loop import Poll


def test_returns_the_readable_ones_of_the_given_sockets() -> None:
    made = 0

    def poller() -> select.poll:
        nonlocal made
        made += 1
        return select.poll()

    poll = Poll(poller)
    (one, to_one), (other, to_other) = socket.socketpair(), socket.socketpair()
    with one, other, to_one, to_other:
        both = [one.fileno(), other.fileno()]
        assert poll.readable(both, 0) == set()
        to_one.send(b"x")
        assert poll.readable(both, 1.0) == {one.fileno()}
        to_other.send(b"x")
        before = made
        assert poll.readable(both, 1.0) == set(both)
        assert made == before, "the sockets were the same"
        assert poll.readable(both[:1], 1.0) == {one.fileno()}


def test_zmq_sockets_beside_descriptors() -> None:
    poll = Poll(zmq.Poller)
    one, to_one = socket.socketpair()
    with zmq.Context() as context, context.socket(zmq.PAIR) as other, one, to_one:
        other.bind("inproc://other")
        with context.socket(zmq.PAIR) as to_other:
            to_other.connect("inproc://other")
            to_other.send(b"x")
            assert poll.readable([one.fileno(), other], 1.0) == {other}
            to_one.send(b"x")
            assert poll.readable([one.fileno(), other], 1.0) == {one.fileno(), other}
