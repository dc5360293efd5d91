"""Publishes KV cache events over ZMQ in the frames of vLLM 0.32, so that routers can follow the prefix cache.

PUB       topic, sequence (8 bytes, big-endian, from 0), batch                       one message per batch
ROUTER    a request: [identity], empty, first sequence wanted (8 bytes)
          answers:   [identity], empty, topic, sequence, batch                       one for each batch in the buffer
          the end:   [identity], empty, empty, sequence -1, empty
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from headrace.core.config import KvEventsConfig
from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch, KvEventMessage
from headrace.core.stats import Counters, Stats
from headrace.core.types.addresses import is_wildcard, url
from headrace.core.types.errors import ConfigError

Socket = zmq.Socket[bytes]

END = (-1).to_bytes(8, "big", signed=True)
REPLAY_PASS = 128  # batches replayed, and requests received, in one turn of the loop
MAX_REPLAYS = 64  # at the same time; a subscriber that is refused asks again
MAX_REQUEST_BYTES = 1024
LINGER_MS = 500  # for the last batch when the server ends


class KvEventPublisher:
    """A port of the scheduler's loop that publishes KvEvents: those of one turn are one batch, sent at the next tick.

    Never blocks: a subscriber that is `buffer` batches behind misses what follows, and can request a replay of the
    newest `buffer` batches. A replay is sent in small passes between other work, until it has caught up with the newest
    batch. wall: returns seconds since 1970. Raises ConfigError for an address that cannot be bound.
    """

    def __init__(
        self, config: KvEventsConfig, context: "zmq.Context[Socket]", wall: Callable[[], float] = time.time
    ) -> None:
        self._wall = wall
        self._topic = config.topic.encode()
        self._pub = context.socket(zmq.PUB)
        self._pub.sndhwm = config.buffer
        self._pub.linger = LINGER_MS
        _bind(self._pub, config.host, config.port)
        try:
            self._router = _router(context, config) if config.replay_port else None
        except ConfigError:
            self._pub.close()
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._events: list[KvEventMessage] = []
        self._kept: deque[bytes] = deque(maxlen=config.buffer)
        self._next = 0  # sequence of the next batch
        self._replays: dict[bytes, int] = {}  # by identity, the next sequence to send
        self._counters = Counters()

    def sockets(self) -> Sequence[Socket]:
        """Sockets to poll for reading."""
        return () if self._router is None else (self._router,)

    def receive(self, now: float) -> Sequence[Any]:
        """Receive replay requests. A second one from the same subscriber replaces the first."""
        assert self._router is not None, "only the replay socket is polled"
        for _ in range(REPLAY_PASS):
            try:
                identity, *request = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(request) != 2 or request[0] or len(request[1]) != 8:
                self._counters.add("malformed_frames_total", labels=("kv_events_replay",))
            elif identity in self._replays or len(self._replays) < MAX_REPLAYS:
                self._replays[identity] = int.from_bytes(request[1], "big")
                self._counters.add("kv_event_replays_total", labels=("accepted",))
            else:
                self._counters.add("kv_event_replays_total", labels=("refused",))
        return ()

    def apply(self, command: KvEventMessage, now: float) -> Sequence[Any]:
        """Add an event to the next batch."""
        self._events.append(command)
        return ()

    def tick(self, now: float) -> Sequence[Any]:
        """Publish the batch, and send a pass of a replay."""
        if self._events:
            self._publish()
        if self._replays:
            self._replay()
        return ()

    def next_deadline(self) -> float | None:
        """Due at once while there is something to send."""
        return 0.0 if self._events or self._replays else None

    def statistics(self) -> Stats:
        """Counters of events and replays."""
        return Stats(self._counters.snapshot())

    def close(self) -> None:
        """Publish the last batch and close the sockets."""
        if self._events:
            self._publish()
        self._pub.close()
        if self._router is not None:
            self._router.close()

    def _publish(self) -> None:
        batch = self._encoder.encode(KvEventBatch(ts=self._wall(), events=tuple(self._events)))
        for event in self._events:
            self._count(event)
        self._events.clear()
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

    def _replay(self) -> None:
        """Send one pass to the first subscriber of the queue, which then goes to its end unless it is done."""
        identity = next(iter(self._replays))
        first_kept = self._next - len(self._kept)
        start = max(self._replays.pop(identity), first_kept)
        end = min(start + REPLAY_PASS, self._next)
        for sequence in range(start, end):
            batch = self._kept[sequence - first_kept]
            if not self._answer(identity, self._topic, sequence.to_bytes(8, "big"), batch):
                return
            self._counters.add("kv_event_batches_replayed_total")
        if end < self._next:
            self._replays[identity] = end
        else:
            self._answer(identity, b"", END, b"")

    def _answer(self, identity: bytes, *frames: bytes) -> bool:
        """False if the subscriber is gone or has not read a whole replay; it gets nothing more then."""
        assert self._router is not None
        try:
            self._router.send_multipart((identity, b"", *frames), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True


def publisher_endpoint(host: str, port: int) -> str:
    """ZMQ address of a publisher; a wildcard host is written `*`, as in vLLM."""
    return url("tcp", "*" if is_wildcard(host) else host, port)


def _router(context: "zmq.Context[Socket]", config: KvEventsConfig) -> Socket:
    """The socket for replays. Raises ConfigError for an address that cannot be bound."""
    router = context.socket(zmq.ROUTER)
    router.router_mandatory = True  # sending to a subscriber that is gone or does not read is an error
    router.sndhwm = config.buffer + 1  # one whole replay and its end
    router.linger = 0
    router.maxmsgsize = MAX_REQUEST_BYTES
    _bind(router, config.host, config.replay_port)
    return router


def _bind(socket: Socket, host: str, port: int) -> None:
    socket.ipv6 = True
    address = publisher_endpoint(host, port)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(
            f"cannot listen on {address}: {os.strerror(error.errno or 0)}; choose another port"
        ) from error
