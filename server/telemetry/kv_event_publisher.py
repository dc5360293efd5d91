"""Publishes KV cache events over ZMQ in the frames of vLLM 0.32, so that routers can follow the prefix cache.

XPUB      topic, sequence (8 bytes, big-endian, from 0), batch                       one message per batch
ROUTER    replay of batches that a subscriber has missed, without blocking:
            a request: [identity], empty, first sequence wanted (8 bytes, big-endian)
            answers:   [identity], empty, topic, sequence, batch                     one for each batch in the buffer
            the end:   [identity], empty, empty, sequence -1, empty

A replay is sent in small passes between other work, until it has caught up with the newest batch. A bounded number of
messages is queued for a slow subscriber. The connection of one that reads nothing for SILENCE_S is closed.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from headrace.core.config import KvEventsConfig
from headrace.core.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventMessage,
    ReplicaKvEvent,
)
from headrace.core.runtime.clock import wall_time
from headrace.core.stats import Counters, Stats
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import is_wildcard, url
from headrace.transfer.sockets.connections import REFUSED, UNREAD, Connection, Connections

Socket = zmq.Socket[bytes]

RECEIVE_PASS = 128  # subscriptions received in one turn of the loop
MAX_TOPIC_BYTES = 256
MAX_TOPICS = 64  # of one connection; libzmq keeps each in a tree for as long as the connection is open
UNREAD_TOPICS = 8  # of one connection; libzmq processes all that have arrived when something is published
COUNTED = 1024  # connections whose topics are counted
LINGER_MS = 500  # for the last batch when the server ends

# Of replays:
END = (-1).to_bytes(8, "big", signed=True)
PASS = 128  # batches replayed, and requests received, in one turn of the loop
MAX_REPLAYS = 64  # at the same time; a subscriber that is refused asks again
QUEUED = 256  # messages for one subscriber
RETRY_S = 0.005  # nothing wakes the loop when a subscriber has read
SILENCE_S = 5.0  # longest time for which a subscriber may read nothing of its replay
MAX_REQUEST_BYTES = 1024


class KvEventPublisher:
    """A port of the scheduler's loop that publishes KvEvents: those of one turn and replica are one batch, sent at the
    next tick.

    Never blocks: a subscriber that is `buffer` batches behind misses what follows, and can request a replay of the
    newest `buffer` batches. wall: returns seconds since 1970. Raises ConfigError for an address that cannot be bound.
    """

    def __init__(
        self, config: KvEventsConfig, context: "zmq.Context[Socket]", wall: Callable[[], float] = wall_time
    ) -> None:
        self._wall = wall
        self._topic = config.topic.encode()
        self._counters = Counters()
        self._connections = Connections(context, "kv_events")
        self._pub = context.socket(zmq.XPUB)  # a PUB that reports subscriptions
        self._pub.sndhwm, self._pub.rcvhwm = config.buffer, UNREAD_TOPICS
        self._pub.maxmsgsize = MAX_TOPIC_BYTES
        self._connections.watch(self._pub)
        self._replay = ReplaySocket(config, context, self._counters) if config.replay_port else None
        try:
            _bind(self._pub, config.host, config.port)
            if self._replay is not None:
                _bind(self._replay.socket, config.host, config.replay_port)
        except ConfigError:
            self._close(0)
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._events: list[tuple[int, KvEventMessage]] = []  # each with its replica
        self._kept: deque[bytes] = deque(maxlen=config.buffer)
        self._next = 0  # sequence of the next batch
        self._topics: dict[int, int] = {}  # by the number of a connection, how many it has subscribed to

    def sockets(self) -> Sequence[Socket]:
        """Sockets to poll for reading."""
        own = (self._pub, *self._connections.sockets())
        return own if self._replay is None else (self._replay.socket, *self._replay.connections.sockets(), *own)

    def receive(self, now: float) -> Sequence[Any]:
        """Receive subscriptions and replay requests."""
        self._connections.receive(now)
        for _ in range(RECEIVE_PASS):
            try:
                frame = self._pub.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._subscribed(frame, now)
        if self._replay is not None:
            self._replay.receive(now)
        return ()

    def apply(self, command: KvEventMessage | ReplicaKvEvent, now: float) -> Sequence[Any]:
        """Add an event to the next batch of its replica."""
        if isinstance(command, ReplicaKvEvent):
            self._events.append((command.replica, command.event))
        else:
            self._events.append((0, command))
        return ()

    def tick(self, now: float) -> Sequence[Any]:
        """Publish the batch of each replica, and send a pass of a replay."""
        if self._events:
            self._publish()
        if self._replay is not None:
            self._replay.send(self._kept, self._next, now)
        return ()

    def next_deadline(self) -> float | None:
        """Due at once while there is something to send."""
        if self._events:
            return 0.0
        return self._replay.next_deadline() if self._replay is not None else None

    def statistics(self) -> Stats:
        """Counters of events, replays and closed connections."""
        closed = self._connections.statistics()
        replays = self._replay.connections.statistics() if self._replay is not None else ()
        return Stats((*self._counters.snapshot(), *closed, *replays))

    def close(self) -> None:
        """Publish the last batch and close the sockets."""
        if self._events:
            self._publish()
        self._close(LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        self._connections.close()
        self._pub.close(linger=linger_ms)
        if self._replay is not None:
            self._replay.close()

    def _subscribed(self, frame: zmq.Frame, now: float) -> None:
        """Count a topic that gained its first subscriber, or lost its last one."""
        connection = self._connections.of(frame)
        if connection is None:
            return
        topics = self._topics[connection.number] = self._topics.get(connection.number, 0) + 1
        if topics > MAX_TOPICS:
            self._connections.close_one(connection, REFUSED, now)
        if len(self._topics) > COUNTED:
            del self._topics[next(iter(self._topics))]

    def _publish(self) -> None:
        events, self._events = self._events, []
        for replica in sorted({replica for replica, _ in events}):
            own = tuple(event for each, event in events if each == replica)
            batch = self._encoder.encode(KvEventBatch(ts=self._wall(), events=own, data_parallel_rank=replica))
            for event in own:
                self._count(event)
            self._kept.append(batch)
            self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), batch), zmq.NOBLOCK)
            self._next += 1
            self._counters.add("kv_event_batches_total")

    def _count(self, event: KvEventMessage) -> None:
        match event:
            case BlockStored():
                self._counters.add("kv_events_published_total", labels=("stored",))
                self._counters.add("kv_event_blocks_total", len(event.block_hashes), ("stored",))
            case BlockRemoved():
                self._counters.add("kv_events_published_total", labels=("removed",))
                self._counters.add("kv_event_blocks_total", len(event.block_hashes), ("removed",))
            case AllBlocksCleared():
                self._counters.add("kv_events_published_total", labels=("cleared",))


def publisher_endpoint(host: str, port: int) -> str:
    """ZMQ address of a publisher; a wildcard host is written `*`, as in vLLM."""
    return url("tcp", "*" if is_wildcard(host) else host, port)


def _bind(socket: Socket, host: str, port: int) -> None:
    socket.ipv6 = True
    address = publisher_endpoint(host, port)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {address}: {os.strerror(error.errno or 0)}; choose another port"
        ) from error


@dataclass(slots=True)
class KvReplay:
    """The replay that one subscriber has asked for."""

    next: int
    """Sequence of the next batch to send."""

    connection: Connection | None
    stalled: float | None = None
    """Time since which the subscriber has read nothing; None while it reads."""


class ReplaySocket:
    """The ROUTER for replays, which the caller binds, and the replays in progress. counters: the caller's."""

    def __init__(self, config: KvEventsConfig, context: "zmq.Context[Socket]", counters: Counters) -> None:
        self._topic = config.topic.encode()
        self._counters = counters
        self.connections = Connections(context, "kv_events_replay", has_session=lambda route: route in self._replays)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.router_mandatory = True  # sending to a subscriber that is gone or does not read is an error
        self.socket.sndhwm = QUEUED
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_REQUEST_BYTES
        self.connections.watch(self.socket)
        self._replays: dict[bytes, KvReplay] = {}  # by identity, the one that has waited longest first
        self._retry_at = 0.0

    def receive(self, now: float) -> None:
        """Receive requests. A second one from the same subscriber replaces the first."""
        self.connections.receive(now)
        for _ in range(PASS):
            try:
                identity, *request = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.connections.note(identity.bytes, request[-1] if request else identity)
            self._asked(identity.bytes, request)

    def send(self, kept: Sequence[bytes], end: int, now: float) -> None:
        """Send one pass to the subscriber that has waited longest. kept: the batches before sequence `end`."""
        if not self._replays:
            return
        identity = next(iter(self._replays))
        replay = self._replays.pop(identity)
        before = replay.next = max(replay.next, end - len(kept))
        problem = 0
        while not problem and replay.next < min(before + PASS, end):
            batch = kept[replay.next - end]
            problem = self._answer(identity, self._topic, replay.next.to_bytes(8, "big"), batch)
            if not problem:
                replay.next += 1
                self._counters.add("kv_event_batches_replayed_total")
        if not problem and replay.next >= end:
            problem = self._answer(identity, b"", END, b"")
            if not problem:
                return
        if problem == zmq.EHOSTUNREACH:
            return
        if not problem or replay.next > before:
            replay.stalled = None
        elif replay.stalled is None:
            replay.stalled = now
        elif now - replay.stalled > SILENCE_S:
            self.connections.close_one(replay.connection, UNREAD, now)
            return
        self._replays[identity] = replay
        self._retry_at = now + RETRY_S

    def next_deadline(self) -> float | None:
        """Due at once while a subscriber reads what it gets."""
        if not self._replays:
            return None
        return self._retry_at if all(each.stalled is not None for each in self._replays.values()) else 0.0

    def close(self) -> None:
        """Close the socket and its monitor."""
        self.connections.close()
        self.socket.close()

    def _asked(self, identity: bytes, request: Sequence[zmq.Frame]) -> None:
        if len(request) != 2 or len(request[0]) or len(request[1]) != 8:
            self._counters.add("malformed_frames_total", labels=("kv_events_replay",))
            return
        known = self._replays.get(identity)
        if known is None and len(self._replays) >= MAX_REPLAYS:
            self._counters.add("kv_event_replays_total", labels=("refused",))
            return
        if known is None:
            known = self._replays[identity] = KvReplay(0, self.connections.of(request[-1]))
        known.next = int.from_bytes(request[1].bytes, "big")
        self._counters.add("kv_event_replays_total", labels=("accepted",))

    def _answer(self, identity: bytes, *frames: bytes) -> int:
        """Send a message. Returns 0, EHOSTUNREACH when the subscriber is gone, or EAGAIN when its queue is full."""
        try:
            self.socket.send_multipart((identity, b"", *frames), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return error.errno
            raise
        return 0
