"""Digests of KV pages: a page is named by the prompt prefix that it ends, the same on every server.

A chain of SHA-256:

    root     = SHA-256(ROOT, then the cache salt in UTF-8)
    digest_0 = SHA-256(root,       then the page's key: its token ids as little-endian int32, and its images)
    digest_n = SHA-256(digest_n-1, then the page's key)

A cryptographic hash, since clients choose the tokens, and equal digests share KV.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256

from headrace.core.types.packed import ITEM_BYTES

ROOT = b"headrace kv 1\0"
DIGEST_BYTES = 32


def root_digest(salt: bytes) -> bytes:
    """The digest before the first page of a prompt, from the cache salt."""
    return sha256(ROOT + salt).digest()


def page_digest(parent: bytes, key: bytes) -> bytes:
    """The digest of a page from its parent's (the root's for the first page) and its key (page_key())."""
    return sha256(parent + key).digest()


def page_digests(pages: Iterable[bytes], digest: bytes) -> Iterator[bytes]:
    """Digests of consecutive pages, after the one with this digest. pages: their keys."""
    for page in pages:
        digest = page_digest(digest, page)
        yield digest


def text_digests(tokens: bytes, page_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """Digests of the full pages of a prompt without images. tokens: packed."""
    size = page_size * ITEM_BYTES
    keys = (tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size))
    return page_digests(keys, root_digest(salt))
