"""Memory of a GPU as the transfer sees it: addresses that a network card or another GPU reads, and this process does
not."""

from typing import Any, NamedTuple

import numpy as np

from headrace.transfer.protocol.layout import Bytes


class DeviceMemory(NamedTuple):
    """A range of a GPU's memory."""

    address: int
    nbytes: int
    device: int
    """Number of the GPU, as this process counts them."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> Bytes:
        """An array uint8 [nbytes] whose views have the addresses and strides of what lies there. None of its elements
        may be read or written."""
        return np.asarray(self)
