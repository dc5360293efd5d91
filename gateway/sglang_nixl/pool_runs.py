"""The pool in SGLang's layout, and which of its bytes go where in the memory of a decode rank. Pure arithmetic.

Behind the KV the pool has a metadata row for each page. A room's is that of its first page, so rows need no allocation.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.types.kv.backends import PoolLayout
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.sglang_nixl.aux_row import ROW_BYTES, aux_parts
from headrace.gateway.sglang_nixl.decode_rank import DecodeRank, RankWrite, token_bytes

Offsets = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Run i: lengths[i] bytes at offset here[i] of our pool go to address there[i] of the rank."""

    here: Offsets
    there: Offsets
    lengths: Offsets


class PoolRuns:
    """Runs of a pool of so many pages. geometry: of the whole model, with the decode engines' page size. Raises
    ValueError for other pools than of keys and values."""

    def __init__(self, geometry: Geometry, pages: int) -> None:
        if geometry.components or not geometry.layers:
            raise ValueError("SGLang decode engines are served models with keys and values alone")
        self._geometry, self._pages = geometry, pages
        self._token = token_bytes(geometry)
        self._plane = pages * geometry.page_size * self._token
        self._rows = 2 * geometry.layers * self._plane  # where the metadata rows begin

    @property
    def layout(self) -> PoolLayout:
        """SGLang's: [layer][K, V][page][token][head][dim]."""
        geometry, plane, token = self._geometry, self._plane, self._token
        slot = geometry.head_dim * geometry.item_bytes
        size = self._rows + self._pages * ROW_BYTES
        strides = geometry.page_size * token, 2 * plane, plane, slot, token
        return PoolLayout(bytes=size, pages=self._pages, strides=strides)

    def row(self, first_page: int) -> slice:
        """The bytes of the pool that hold a metadata row."""
        start = self._rows + first_page * ROW_BYTES
        return slice(start, start + ROW_BYTES)

    def kv(self, write: RankWrite, first_page: int, tokens: int) -> Runs:
        """Runs of so many tokens that begin with a page of the pool: what follows them in the last page is not sent."""
        rank, size, heads = write.rank, self._geometry.page_size, self._geometry.kv_heads
        theirs = self._token * rank.heads // heads
        pages = np.asarray(write.target.pages, np.int64)
        if rank.heads == heads:  # pages that follow each other are one run
            breaks = np.flatnonzero(np.diff(pages) != 1) + 1
            starts, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(pages)]])
            here, there = starts * size, pages[starts] * size
            counts = np.minimum(ends * size, tokens) - here
        else:  # the rank's heads lie somewhere within each token
            here = np.arange(tokens)
            there = pages[here // size] * size + here % size
            counts = np.ones(tokens, np.int64)
        first = (first_page * size + here) * self._token + rank.first_head * self._token // heads
        planes = np.arange(2 * self._geometry.layers)[:, None]  # K of a layer, then its V; theirs: all K, then all V
        return Runs(
            (planes * self._plane + first).ravel().astype(np.int64),
            (_addresses(rank)[:, None] + there * theirs).ravel(),
            np.tile(counts * theirs, len(planes)).astype(np.int64),
        )

    def aux(self, write: RankWrite, first_page: int) -> Runs:
        """Runs of a metadata row."""
        places = write.rank.registration.aux_addresses
        parts = aux_parts(len(places))
        addresses = [places[part.buffer] + write.target.aux_index * part.length for part in parts]
        return Runs(
            np.array([self.row(first_page).start + part.start for part in parts], np.int64),
            np.array(addresses, np.uint64).astype(np.int64),
            np.array([part.length for part in parts], np.int64),
        )


def _addresses(rank: DecodeRank) -> Offsets:
    """Addresses of a rank's K of layer 0, V of layer 0, K of layer 1, ..."""
    addresses = np.array(rank.registration.kv_addresses, np.uint64).astype(np.int64)
    return addresses.reshape(2, -1).T.ravel()
