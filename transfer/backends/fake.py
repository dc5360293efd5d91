"""Nothing moves, so that what everything else costs can be measured. The peer decodes from what its pages held."""

from typing import NamedTuple

from core.backends import NixlAccess, PoolMemory
from core.geometry import Geometry
from transfer.backends.base import RemotePages
from transfer.layout import WHOLE, Box, Bytes


class Done(NamedTuple):
    """The Write that was over at once."""

    done: bool = True
    lost: str = ""


class FakePages(RemotePages):
    """RemotePages that stay as they are."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Nothing."""

    def flush(self) -> Done:
        return Done()

    def close(self) -> None:
        """Nothing."""


class FakeReach:
    """A Reach that reaches every pool."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> FakePages:
        return FakePages()
