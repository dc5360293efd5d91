"""Nothing moves, so that what everything else costs can be measured. The peer decodes from what its pages held."""

from typing import NamedTuple

from headrace.core.types.backends import NixlAccess, PoolMemory
from headrace.core.types.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes


class CompletedWrite(NamedTuple):
    """The Write that was over at once."""

    done: bool = True
    lost: str = ""


class FakePages(RemotePages):
    """RemotePages that stay as they are."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Nothing."""

    def flush(self) -> CompletedWrite:
        return CompletedWrite()

    def close(self) -> None:
        """Nothing."""


class FakeTransport:
    """A Reach that reaches every pool."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> FakePages:
        return FakePages()
