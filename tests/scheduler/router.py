"""A router that follows KV events, written from the documentation alone."""

import struct
from collections import Counter
from hashlib import sha256

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventMessage


class Router:
    """Cached pages by hash, each with the hash of the page before it and its tokens."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.kinds: Counter[str] = Counter()

    def hear(self, event: KvEventMessage) -> None:
        self.kinds[type(event).__name__] += 1
        match event:
            case BlockStored():
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, name in enumerate(event.block_hashes):
                    assert parent is None or parent in self.pages, "stored below a page that is not there"
                    assert name not in self.pages, "stored twice"
                    self.pages[name] = (parent, event.token_ids[index * size : (index + 1) * size])
                    parent = name
            case BlockRemoved():
                for name in event.block_hashes:
                    del self.pages[name]
                    assert all(parent != name for parent, _ in self.pages.values()), "removed before its children"
            case AllBlocksCleared():
                self.pages.clear()


def root(salt: str) -> bytes:
    return sha256(b"headrace kv 1\0" + salt.encode()).digest()


def digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return sha256(parent + struct.pack(f"<{len(tokens)}i", *tokens)).digest()


def short(digest: bytes) -> int:
    return int(struct.unpack(">Q", digest[24:])[0])


def name_of(salt: str, pages: list[tuple[int, ...]]) -> int:
    """The hash of the last of these pages, from the documented recipe."""
    found = root(salt)
    for tokens in pages:
        found = digest(found, tokens)
    return short(found)
