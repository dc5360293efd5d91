"""Framing of messages over Unix sockets."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.runtime import frames
from headrace.core.runtime.frames import READ_BYTES, ConnectionClosed, FrameSocket

Pair = tuple[FrameSocket, FrameSocket]


@contextmanager
def ends() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield FrameSocket(one), FrameSocket(other)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ends() as both:
        yield both


@given(st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 3 * READ_BYTES).map(bytes))), st.randoms())
def test_messages_arrive_whole_and_in_order_however_they_are_split(messages: list[bytes], random: Random) -> None:
    received: list[bytes] = []
    with ends() as (one, other):
        for message in messages:
            one.send(message)
            if random.random() < 0.3:
                received += other.receive()
        while len(received) < len(messages):
            one.flush()
            received += other.receive()
        assert received == messages
        assert not one.unsent
        assert other.receive() == []


def test_sending_does_not_block_when_the_other_end_does_not_read(pair: Pair) -> None:
    one, other = pair
    one.send(bytes(10 << 20))
    assert one.unsent
    one.send(b"after it")
    received: list[bytes] = []
    while len(received) < 2:
        received += other.receive()
        one.flush()
    assert received == [bytes(10 << 20), b"after it"]


def test_an_end_that_never_reads_counts_as_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "UNSENT_BYTES", 1 << 20)
    one, _ = pair
    one.send(bytes(4 << 20))
    with pytest.raises(ConnectionClosed, match="does not read"):
        one.send(b"more")


def test_messages_sent_before_the_close_are_received(pair: Pair) -> None:
    one, other = pair
    one.send(b"the last one")
    one.close()
    assert other.receive() == [b"the last one"]
    with pytest.raises(ConnectionClosed, match="closed"):
        other.receive()
    with pytest.raises(ConnectionClosed):
        other.send(b"too late")
