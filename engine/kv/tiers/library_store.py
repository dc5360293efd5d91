"""Library tier: pages of KV files, of which a stage takes its layers and heads. Only read.

A page is read whole and verified by its SHA-256 in the file's header, and the header by the digest that came with the
order: what a store sends is never taken for something else. What fails once as changed is not read again.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import prod

import numpy as np

from headrace.core.messages.orders import CloseKvFile, OpenKvFile
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.kv.kv_files import KvFileError, KvFileHeader
from headrace.core.types.kv.kv_tiers import LIBRARY_PAGES, PageHeader
from headrace.engine.kv.tiers.kv_source import KvFileSource, SourceError, close_quietly, open_source, read_header
from headrace.engine.kv.tiers.pages import Bytes, Parts, TierError, check_slot

log = logging.getLogger(__name__)

ORDER_S = 20.0  # for the pages of one order; the scheduler takes a stage that answers none in --stage-timeout for hung
RETRY_S = 10.0  # after a failure, in which a file is not tried again


class OpenFile:
    """A KV file; it is read when its first page is."""

    def __init__(self, order: OpenKvFile, source: KvFileSource) -> None:
        self.order = order
        self.source = source
        self.header: KvFileHeader | None = None
        self.pages_at = 0
        self.defect = ""
        """What is wrong with it for good."""

        self.bad: set[int] = set()
        """Pages that were changed."""

        self.retry_at = 0.0

    def load_header(self, until: float) -> KvFileHeader:
        """Raises SourceError; KvFileError for a file that is another one than was listed."""
        if self.header is None:
            start, header = read_header(self.source, until)
            if start.digest != self.order.digest or header.pages != self.order.pages:
                raise KvFileError("it is another file than was listed")
            self.header, self.pages_at = header, start.pages_at
        return self.header


class LibraryStore:
    """A TierStore of the KV files that were opened. One thread gets; others may open and close meanwhile."""

    def __init__(
        self,
        fingerprint: str,
        geometry: Geometry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """fingerprint: of the model. geometry: of the stage's pool."""
        self._fingerprint = fingerprint
        self._geometry = geometry
        self._clock = clock
        self._files: dict[int, OpenFile] = {}  # by first slot
        self._firsts: list[int] = []
        self._page: Bytes = np.empty(0, np.uint8)
        self._expected: Sequence[int] = ()
        self._until = 0.0
        self._lock = threading.Lock()

    @property
    def slots(self) -> int:
        """See TierStore."""
        return LIBRARY_PAGES

    def apply(self, order: OpenKvFile | CloseKvFile) -> None:
        """Open or close a file. Any thread."""
        with self._lock:
            if isinstance(order, OpenKvFile):
                self._files[order.first] = OpenFile(order, open_source(order.location, self._clock))
            elif (gone := self._files.pop(order.first, None)) is not None:
                close_quietly(gone.source)
            self._firsts = sorted(self._files)

    def expect(self, slots: Sequence[int]) -> None:
        """See TierStore. All of them together get ORDER_S."""
        self._expected = slots
        self._until = self._clock() + ORDER_S

    def get(self, slot: int) -> Bytes:
        """See TierStore. Raises TierError, IndexError for a slot outside the tier."""
        check_slot(slot, self.slots)
        file, index = self._find(slot)
        where = f"page {index} of {file.order.location}"
        if file.defect or index in file.bad:
            raise TierError("checksum", f"{where}: {file.defect or 'it was changed'}")
        if self._clock() < file.retry_at:
            raise TierError("io", f"{where}: the file could not be read a moment ago")
        try:
            header = file.load_header(self._until)
            self._check(header)
            if len(self._page) != header.page_bytes:
                self._page = np.empty(header.page_bytes, np.uint8)
            file.source.expect(file.pages_at + (self._run(slot, file) + 1) * header.page_bytes)
            file.source.read_into(self._page.data, file.pages_at + index * header.page_bytes, self._until)
        except SourceError as error:
            file.retry_at = self._clock() + RETRY_S
            raise TierError("io", f"{where}: {error}") from error
        except KvFileError as error:
            file.defect = str(error)
            raise TierError("checksum", f"{where}: {error}") from error
        if sha256(self._page.data).digest() != header.checksum(index):
            file.bad.add(index)
            raise TierError("checksum", f"{where} was changed: its SHA-256 is another one")
        return own_part(self._page, header, self._geometry)

    def put(self, slot: int, page: Parts, header: PageHeader | None) -> int:
        """See TierStore: nothing is stored here. Raises TierError."""
        raise TierError("io", "KV files are only read")

    def drop(self, slot: int) -> None:
        """See TierStore: files stay as they are."""

    def take_lost(self) -> Sequence[int]:
        """See TierStore: always empty."""
        return ()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                close_quietly(file.source)
            self._files.clear()
            self._firsts = []

    def _find(self, slot: int) -> tuple[OpenFile, int]:
        """The file of a slot, and which of its pages it is. Raises TierError."""
        with self._lock:
            at = bisect_right(self._firsts, slot) - 1
            file = self._files[self._firsts[at]] if at >= 0 else None
        if file is None or slot >= file.order.first + file.order.pages:
            raise TierError("missing", f"slot {slot} of the library tier is of no file")
        return file, slot - file.order.first

    def _run(self, slot: int, file: OpenFile) -> int:
        """The page up to which the expected slots follow one another from this one on."""
        expected = set(self._expected)
        while slot + 1 in expected and slot + 1 < file.order.first + file.order.pages:
            slot += 1
        return slot - file.order.first

    def _check(self, header: KvFileHeader) -> None:
        """Raises KvFileError for pages of another model or geometry than this stage's."""
        own = self._geometry
        if header.fingerprint != self._fingerprint or header.page_size != own.page_size:
            raise KvFileError("it is of another model or page size")
        whole = {tensor.name: tensor for tensor in header.tensors}
        for part in _paged(own):
            other = whole.get(part.name)
            if other is None or not _contains(other, part):
                raise KvFileError(f"it has no tensor {part.name} with the layers and heads of this stage")


def own_part(page: Bytes, header: KvFileHeader, own: Geometry) -> Bytes:
    """What a stage's pool holds of a page of the whole model: its layers and heads, tensor by tensor."""
    found: dict[str, tuple[Bytes, Component]] = {}
    at = 0
    for tensor in header.tensors:
        size = tensor.token_bytes * header.page_size
        found[tensor.name] = page[at : at + size], tensor
        at += size
    parts = []
    for part in _paged(own):
        data, tensor = found[part.name]
        shape = (tensor.layers, tensor.planes, tensor.kv_heads, header.page_size * tensor.slot_bytes)
        rows = data.reshape(shape)[part.layer_start : part.layer_end, :, part.head_start : part.head_end]
        parts.append(np.ascontiguousarray(rows).reshape(prod(rows.shape)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _paged(geometry: Geometry) -> list[Component]:
    return [part for part in geometry.tensors if not part.per_request]


def _contains(whole: Component, part: Component) -> bool:
    same = (whole.dtype, whole.planes, whole.head_dim) == (part.dtype, part.planes, part.head_dim)
    return same and part.layer_end <= whole.layers and part.head_end <= whole.kv_heads
