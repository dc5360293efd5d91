"""What writes into the memory of a decode rank, as the threads see it."""

from collections.abc import Callable
from typing import Protocol

from headrace.gateway.sglang_nixl.decode_rank import DecodeRank
from headrace.gateway.sglang_nixl.pool_runs import Runs
from headrace.transfer.backends.base import RemoteWrite


class RankWriter(Protocol):
    """Writes into the memory of one decode rank. Used by one thread, and no call waits for the other side."""

    def write_kv(self, runs: Runs) -> RemoteWrite:
        """Start writing runs of the pool into its KV."""
        ...

    def write_row(self, runs: Runs) -> RemoteWrite:
        """Start writing runs of the pool into its metadata buffers."""
        ...

    def close(self) -> None:
        """End all writing: no byte arrives at the rank any more, and none of the pool is read."""
        ...


MakeWriter = Callable[[DecodeRank], RankWriter]  # raises OSError or ValueError
