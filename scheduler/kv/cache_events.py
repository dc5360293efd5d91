"""Cache events: which pages the prefix cache gained and lost, for routers that follow it.

A page is named by its digest (core/types/kv/page_digests.py). Events carry the last eight bytes of a digest as a
big-endian number, as vLLM shortens its own.
"""

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Hash, KvEventMessage, Medium
from headrace.core.types.kv.kv_tiers import Tier
from headrace.core.types.kv.page_digests import page_digest, root_digest
from headrace.core.types.packed import ITEM_BYTES, unpack

MEDIA: dict[Tier, Medium] = {"host": "CPU", "disk": "DISK"}


class CacheEventLog:
    """Collects cache events in order. Consecutive stored pages of a path share an event, as do evictions in a row."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KvEventMessage] = []
        self._stored: list[Hash] = []
        self._tokens: list[int] = []
        self._parent: Hash | None = None
        self._removed: list[Hash] = []

    def stored(self, parent: bytes | None, salt: bytes, key: bytes) -> bytes:
        """Note a page below the one with the parent's digest (None: at the salt's root); return its digest. key: see
        page_key()."""
        digest = page_digest(parent or root_digest(salt), key)
        above = None if parent is None else short(parent)
        if self._removed or not self._stored or self._stored[-1] != above:
            self._close()
            self._parent = above
        self._stored.append(short(digest))
        self._tokens.extend(unpack(key[: self._page_size * ITEM_BYTES]))
        return digest

    def removed(self, digest: bytes) -> None:
        """Note that a page was evicted."""
        if self._stored:
            self._close()
        self._removed.append(short(digest))

    def copied(self, parent: bytes, digest: bytes, tier: Tier) -> None:
        """Note that a tier has a copy of a page, below the one with the parent's digest (the root's digest: b"")."""
        self._close()
        self._events.append(
            BlockStored(
                block_hashes=(short(digest),),
                parent_block_hash=short(parent) if parent else None,
                token_ids=(),
                block_size=self._page_size,
                medium=MEDIA[tier],
            )
        )

    def copy_dropped(self, digest: bytes, tier: Tier) -> None:
        """Note that a tier's copy of a page was given up."""
        self._close()
        self._events.append(BlockRemoved(block_hashes=(short(digest),), medium=MEDIA[tier]))

    def cleared(self) -> None:
        """Note that the cache is empty. Events before that are discarded."""
        self.take()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KvEventMessage]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        """End the event that is being collected."""
        if self._stored:
            self._events.append(
                BlockStored(
                    block_hashes=tuple(self._stored),
                    parent_block_hash=self._parent,
                    token_ids=tuple(self._tokens),
                    block_size=self._page_size,
                )
            )
            self._stored, self._tokens = [], []
        if self._removed:
            self._events.append(BlockRemoved(block_hashes=tuple(self._removed)))
            self._removed = []


def short(digest: bytes) -> Hash:
    """The 64 bits of a digest that events carry."""
    return int.from_bytes(digest[-8:], "big")
