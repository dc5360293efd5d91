"""The ways of one stage to its peers' pages: found when a peer attaches, given up when its session ends. Pure.

Whatever was agreed at the hello, a pool that turns out to be out of reach is filled by frames.
"""

import logging
from collections.abc import Iterable, Mapping

from headrace.core.config import TransferConfig
from headrace.core.types.backends import FAKE, SHM
from headrace.transfer.backends.base import Transport
from headrace.transfer.data.outbound import Lane
from headrace.transfer.protocol import checksum
from headrace.transfer.protocol.messages import Attach

log = logging.getLogger(__name__)


class PeerPools:
    """reaches: by backend."""

    def __init__(self, config: TransferConfig, stage: int, reaches: Mapping[str, Transport]) -> None:
        self._config = config
        self._stage = stage
        self._reaches = dict(reaches)

    def open(self, session: str, lane: Lane, attach: Attach) -> None:
        """Find the way into the peer's pool, once, and whether chunks that take it have checksums."""
        memory, lane.memory = lane.memory, None
        reach = self._reaches.get(lane.backend)
        if memory is not None and reach is not None:
            try:
                lane.remote = reach.open(session, self._stage, lane.destination, memory, attach.nixl)
            except (OSError, ValueError) as error:
                text = "KV goes to stage %d of a peer in frames: its pool is out of reach by %s: %s"
                log.warning(text, lane.stage, lane.backend, error)
        lane.checksum = self._checksums(lane, attach)

    def close(self, lanes: Iterable[Lane]) -> None:
        """Begin no write to these any more."""
        for lane in lanes:
            if lane.remote is not None:
                lane.remote.close()
                lane.remote = None

    def _checksums(self, lane: Lane, attach: Attach) -> bool:
        """Whether one of the two sides wants them."""
        if lane.backend == FAKE:
            return False
        if lane.backend == SHM and lane.remote is not None:
            return self._config.checksum_shm or attach.checksum_shm
        return self._config.checksum or attach.checksum != checksum.NONE
