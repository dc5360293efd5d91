"""Replays batches of KV events to subscribers that have missed them, without blocking.

ROUTER    a request: [identity], empty, first sequence wanted (8 bytes, big-endian)
          answers:   [identity], empty, topic, sequence, batch                       one for each batch in the buffer
          the end:   [identity], empty, empty, sequence -1, empty

A replay is sent in small passes between other work, until it has caught up with the newest batch. A bounded number of
messages is queued for a slow subscriber. The connection of one that reads nothing for SILENCE_S is closed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from headrace.core.config import KvEventsConfig
from headrace.core.stats import Counters
from headrace.transfer.sockets.connections import UNREAD, Connection, Connections

Socket = zmq.Socket[bytes]

END = (-1).to_bytes(8, "big", signed=True)
PASS = 128  # batches replayed, and requests received, in one turn of the loop
MAX_REPLAYS = 64  # at the same time; a subscriber that is refused asks again
QUEUED = 256  # messages for one subscriber
RETRY_S = 0.005  # nothing wakes the loop when a subscriber has read
SILENCE_S = 5.0  # longest time for which a subscriber may read nothing of its replay
MAX_REQUEST_BYTES = 1024


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
