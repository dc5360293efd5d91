"""All that hands KV over to SGLang decode engines: pool, peer thread, room thread, bootstrap server.

prefill servers ──chunks──► peer thread ──► pool ──► room thread ──NIXL──► decode engines
                                 results ──────────► │    ▲ messages        │
                                             bootstrap server ◄──GET /route─┘
"""

import logging
import threading
from collections.abc import Callable

import msgspec

from headrace.core.config import TransferConfig
from headrace.core.messages.replies import PrefillState
from headrace.core.types.errors import ConfigError, ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.sglang_nixl.bootstrap import Bootstrap, BootstrapServer, RankAddress, Setup
from headrace.gateway.sglang_nixl.pool_runs import PoolRuns
from headrace.gateway.sglang_nixl.records import RoomLimits
from headrace.gateway.sglang_nixl.releases import RELEASES
from headrace.gateway.sglang_nixl.room_thread import RoomThread
from headrace.peer.commands import LoadResult
from headrace.peer.records import PeerLimits
from headrace.peer.shared_staging import SharedStaging
from headrace.peer.thread import PeerFailed, PeerThread

TESTED = f"tested with SGLang {', '.join(RELEASES)} on CPUs, with KV in host memory, and never on a GPU"
log = logging.getLogger(__name__)

RESULTS_WAIT_S = 1.0


class HandoverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How SGLang decode engines reach this side."""

    host: str
    """IP address that is listened on, and that engines are told."""
    bootstrap_port: int = 8998
    """0 takes a free one."""
    rank_port: int = 0
    """Where messages about rooms go; 0 takes a free one."""
    devices: str = ""
    """Network device that NIXL may use; "" for all."""
    rooms: RoomLimits = RoomLimits()


class KvHandover:
    """The threads, from start() to stop(). Public methods may be called by any thread."""

    def __init__(
        self,
        geometry: Geometry,
        options: HandoverOptions,
        limits: PeerLimits,
        *,
        name: str,
        max_model_len: int,
        ended: Callable[[str, ErrorInfo | None], None],
        server_state: Callable[[PrefillState], None] = lambda _state: None,
        is_decode_host: Callable[[str], bool] = lambda _address: True,
        registered: Callable[[str, str], None] | None = None,
        transfer: TransferConfig | None = None,
        api_key: str = "",
    ) -> None:
        """Make the pool, and open the sockets.

        geometry: of the whole model, with the decode engines' page size. limits: of the peer thread, with the size of
        the pool. name, max_model_len, transfer, api_key: as in PeerThread. ended, is_decode_host (is_allowed there),
        registered: as in RoomThread. Raises ConfigError.
        """
        try:
            from headrace.gateway.sglang_nixl.nixl_writer import NixlRankWriter
        except ImportError as error:
            raise ConfigError(f"SGLang decode engines need NIXL: install headrace[nixl] ({error})") from error
        log.warning("SGLang decode engines: %s", TESTED)
        try:
            self.staging = SharedStaging(geometry, PoolRuns(geometry, limits.pages).layout)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.peer = PeerThread(
            limits, self.staging, name=name, max_model_len=max_model_len, transfer=transfer, api_key=api_key
        )
        self._server_state = server_state
        self.rooms = RoomThread(
            geometry,
            limits.pages,
            self.staging.buffer,
            host=options.host,
            port=options.rank_port,
            limits=options.rooms,
            make_writer=lambda rank: NixlRankWriter(rank, self.staging.buffer, options.devices),
            submit=self.peer.submit,
            ended=ended,
            unregistered=lambda address: bootstrap.forget(address),
            is_allowed=is_decode_host,
            registered=registered,
        )
        bootstrap = Bootstrap(Setup(), RankAddress(options.host, self.rooms.port))
        self._bootstrap = BootstrapServer(options.host, options.bootstrap_port, bootstrap)
        self.bootstrap_port = self._bootstrap.port
        self._results = threading.Thread(target=self._forward, name="headrace-sglang-results", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in (self.peer, self.rooms, self._bootstrap, self._results))

    def start(self) -> None:
        """Start the threads."""
        for thread in (self.peer, self._results, self.rooms, self._bootstrap):
            thread.start()

    def stop(self) -> None:
        """End all writing, and the threads. Every request that has no answer gets one."""
        self._bootstrap.stop()
        self.rooms.stop()
        self.peer.stop()
        if self._results.is_alive():
            self._results.join(RESULTS_WAIT_S)
        self.staging.close()

    def _forward(self) -> None:
        """Take the peer thread's results to the rooms."""
        try:
            while True:
                for result in self.peer.results(RESULTS_WAIT_S):
                    if isinstance(result, LoadResult):
                        self.rooms.heard(result)
                    else:
                        self._server_state(result)
        except PeerFailed as error:
            log.debug("%s", error)
            self.rooms.stop(0.0)
