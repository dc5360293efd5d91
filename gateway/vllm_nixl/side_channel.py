"""Side channel of NixlConnector's prefill side: where decode engines ask for the metadata of its NIXL agent."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.config import TransferConfig
from headrace.gateway.vllm_nixl.wire import QUERY_BYTES, is_query
from headrace.transfer.sockets.listener import Listener

QUEUED_REPLIES = 64  # per connection


class SideChannel:
    """A bound ROUTER that answers every query with the same payload.

    Attributes:
        port: TCP port that it is bound to.
        handshakes: queries answered.
    """

    def __init__(self, context: Any, host: str, port: int) -> None:
        """port: 0 takes a free one. Raises ConfigError when it cannot be bound."""
        self._listener = Listener(
            TransferConfig(host=host),
            context,
            "side_channel",
            port=port,
            max_frame=QUERY_BYTES,
            queue=QUEUED_REPLIES,
            unread=QUEUED_REPLIES,
        )
        self.port = self._listener.port
        self.handshakes = 0

    def sockets(self) -> Sequence[Any]:
        """Sockets to poll for reading."""
        return self._listener.sockets()

    def answer(self, payload: bytes, now: float) -> int:
        """Answer what has come; returns the number of handshakes. payload: see wire.encode_payload()."""
        before = self.handshakes
        for arrival in self._listener.receive(now):
            delimiter, query = arrival.body if len(arrival.body) == 2 else (b"", b"")
            if not delimiter and is_query(query):
                clock = msgspec.msgpack.encode(time.perf_counter())
                self._listener.put_tracked((arrival.route, b"", payload, clock), ())
                self.handshakes += 1
            else:
                self._listener.refuse(arrival, b"", now)
        return self.handshakes - before

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
