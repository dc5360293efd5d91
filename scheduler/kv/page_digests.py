"""Digests of KV pages: a page is named by the prompt prefix that it ends, the same on every server.

A page is named by a chain of SHA-256 digests:

    root     = SHA-256(ROOT, then the cache salt in UTF-8)
    digest_0 = SHA-256(root,       then the page's token ids as little-endian int32)
    digest_n = SHA-256(digest_n-1, then the page's token ids as little-endian int32)

A cryptographic hash, since clients choose the tokens, and equal digests share KV.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256

ROOT = b"headrace kv 1\0"


def root_digest(salt: bytes) -> bytes:
    """The digest before the first page of a prompt, from the cache salt."""
    return sha256(ROOT + salt).digest()


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a page from its parent's (the root's for the first page) and its packed token ids."""
    return sha256(parent + tokens).digest()


def page_digests(pages: Iterable[bytes], digest: bytes) -> Iterator[bytes]:
    """Digests of consecutive pages, after the one with this digest."""
    for page in pages:
        digest = page_digest(digest, page)
        yield digest
