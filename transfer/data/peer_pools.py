"""Peers' KV pools, opened for one-sided writes when a peer attaches and closed when its session ends.

A pool that cannot be opened, whatever was agreed at the handshake, is filled by frames over ZMQ instead.
"""

import logging
from collections.abc import Iterable, Mapping

from headrace.core.config import TransferConfig
from headrace.core.types.kv.backends import FAKE, SHM
from headrace.transfer.backends.base import Transport
from headrace.transfer.data.outgoing import Lane
from headrace.transfer.protocol import checksum
from headrace.transfer.protocol.messages import Attach

log = logging.getLogger(__name__)


class PeerPools:
    """Opens and closes peers' pools, and decides which chunks have checksums.

    Args:
        stage: our own number in Welcome.
        transports: by backend name.
    """

    def __init__(self, config: TransferConfig, stage: int, transports: Mapping[str, Transport]) -> None:
        self._config = config
        self._stage = stage
        self._transports = dict(transports)

    def open(self, session: str, lane: Lane, attach: Attach) -> None:
        """Open the pool of the peer's stage on its first attach, and decide whether its chunks have checksums."""
        memory, lane.memory = lane.memory, None
        transport = self._transports.get(lane.backend)
        if memory is not None and transport is not None:
            try:
                lane.remote = transport.open(session, self._stage, lane.destination, memory, attach.nixl)
            except (OSError, ValueError) as error:
                text = "KV goes to stage %d of a peer in frames: its pool cannot be opened by %s: %s"
                log.warning(text, lane.stage, lane.backend, error)
        lane.checksum = self._checksums(lane, attach)

    def close(self, lanes: Iterable[Lane]) -> None:
        """Start no write to these peers' stages any more."""
        for lane in lanes:
            if lane.remote is not None:
                lane.remote.close()
                lane.remote = None

    def _checksums(self, lane: Lane, attach: Attach) -> bool:
        """Whether one of the two sides requires checksums."""
        if lane.backend == FAKE:
            return False
        if lane.backend == SHM and lane.remote is not None:
            return self._config.checksum_shm or attach.checksum_shm
        return self._config.checksum or attach.checksum != checksum.NONE
