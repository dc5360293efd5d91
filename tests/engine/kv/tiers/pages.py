"""Pages with known bytes, and stores of them."""

from hashlib import sha256

import numpy as np

from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.tiers.disk_store import DiskStore
from headrace.engine.kv.tiers.pages import Bytes, TierStore
from headrace.engine.kv.tiers.record import HEADER_BYTES, Origin

GEOMETRY = Geometry("float32", layers=2, kv_heads=1, head_dim=4, page_size=4)
ORIGIN = Origin("0123456789abcdef" * 2, GEOMETRY, stage=1)
PAGE = GEOMETRY.page_bytes
RECORD = HEADER_BYTES + PAGE


def page(seed: int) -> Bytes:
    """Other bytes for every seed."""
    return np.random.default_rng(abs(seed)).integers(0, 256, PAGE, dtype=np.uint8)


def header(seed: int) -> PageHeader:
    """A page that follows the one of the seed before."""
    digest, parent, salt = (sha256(text.encode()).digest() for text in (f"{seed}", f"{seed - 1}", "salt"))
    return PageHeader(digest, parent, salt, turn=seed % 5)


def disk(folder: object, records: int = 32, origin: Origin = ORIGIN) -> DiskStore:
    """A disk tier of four segments with room for so many records in all."""
    return DiskStore(str(folder), origin, records * (HEADER_BYTES + origin.geometry.page_bytes))


def put(store: TierStore, slot: int, seed: int | None = None) -> None:
    """Store the page of a seed, by default the slot's number."""
    seed = slot if seed is None else seed
    store.put(slot, [page(seed)], header(seed))


def get(store: TierStore, slot: int) -> Bytes:
    """What the store loads from a slot. Raises TierError."""
    return store.get(slot).copy()
