"""Nothing moves, so that what everything else costs can be measured. The peer decodes from what its pages held."""

from typing import NamedTuple

from core.backends import PoolMemory
from core.geometry import Geometry
from transfer.layout import WHOLE, Box, Bytes


class Done(NamedTuple):
    """The Handle of something that was over at once."""

    done: bool = True


class FakePages:
    """RemotePages that stay as they are."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Nothing."""

    def flush(self) -> Done:
        return Done()

    def close(self) -> None:
        """Nothing."""


class FakeReach:
    """A Reach that reaches every pool."""

    def open(self, session: str, stage: int, geometry: Geometry, memory: PoolMemory) -> FakePages:
        return FakePages()
