"""Tiers that hold copies of KV pages outside the pool, and how such a page is named.

host, disk   what this server has computed or received
library      what KV files hold (core/types/kv/kv_files.py): only read
"""

from typing import Literal

import msgspec

Tier = Literal["host", "disk", "library"]
HOST: Tier = "host"
DISK: Tier = "disk"
LIBRARY: Tier = "library"
TIERS: tuple[Tier, ...] = (HOST, DISK, LIBRARY)
"""Nearest first."""

LIBRARY_PAGES = 1 << 16
"""Pages of KV files that a server keeps track of, at most."""


class TierTokens(msgspec.Struct, frozen=True):
    """Cached tokens of a prompt that were loaded from tiers. The other cached ones were in the pool."""

    host: int = 0
    disk: int = 0
    library: int = 0

    @property
    def total(self) -> int:
        """Of all tiers."""
        return self.host + self.disk + self.library


NONE_LOADED = TierTokens()


class PageHeader(msgspec.Struct, frozen=True, array_like=True):
    """Names one page by the prompt prefix that it ends, so that it is found again after a restart.

    Digests are SHA-256, chained (core/types/kv/page_digests.py), 32 bytes each.
    """

    digest: bytes
    """The page's digest, from the parent's digest and the page's token ids."""
    parent: bytes
    """Digest of the page before it; the salt's digest for the first page of a prompt."""
    salt: bytes
    """Digest of the cache salt."""
    turn: int
    """Turns of the conversation that had used the page when it was written; for eviction."""
