"""A server that publishes KV events, for what follows them."""

import asyncio
import time
from contextlib import suppress

import zmq

from headrace.core.config import KvEventsConfig
from headrace.core.messages.kv_events import KvEventMessage, ReplicaKvEvent
from headrace.core.types.errors import ConfigError
from headrace.peer.kv_event_follower import KvEventSource
from headrace.server.launch.free_port import free_port
from headrace.server.telemetry.kv_event_publisher import KvEventPublisher


class EventServer:
    """A publisher on loopback."""

    def __init__(self, *, replay: bool = True, buffer: int = 100) -> None:
        self._config = config = KvEventsConfig(
            port=free_port(), replay_port=free_port() if replay else 0, buffer=buffer
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = KvEventPublisher(config, self._context)
        self.source = KvEventSource(config.port, config.replay_port)

    def publish(self, event: KvEventMessage | ReplicaKvEvent) -> None:
        """A batch of one event."""
        self._publisher.apply(event, 0.0)
        self._publisher.tick(0.0)

    def restart(self) -> None:
        """End, and come back with nothing published at the same ports, as soon as these are free."""
        self._publisher.close()
        for _ in range(1000):
            with suppress(ConfigError):
                self._publisher = KvEventPublisher(self._config, self._context)
                return
            time.sleep(0.01)
        raise TimeoutError(self._config)

    async def loop(self) -> None:
        """Serve replays until cancelled."""
        while True:
            self._publisher.receive(0.0)
            self._publisher.tick(0.0)
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()
        self._context.term()
