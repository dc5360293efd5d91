"""Fake backend: moves no KV, to measure the cost of everything else. The peer decodes from stale pages."""

from typing import NamedTuple

from headrace.core.types.kv.backends import NixlAccess, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes


class CompletedWrite(NamedTuple):
    """A RemoteWrite that is done already."""

    done: bool = True
    lost: str = ""


class FakePages(RemotePages):
    """RemotePages that are never written."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Does nothing."""

    def flush(self) -> CompletedWrite:
        """Done at once."""
        return CompletedWrite()

    def close(self) -> None:
        """Does nothing."""


class FakeTransport:
    """A Transport to any pool."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> FakePages:
        """Never fails."""
        return FakePages()
