"""How far a stream of orders has come, in a form in which its two ends can compare notes."""

import hashlib

DIGEST_BYTES = 8


class OrderLog:
    """Counts the orders of one stream, and keeps a digest of all of them as they were encoded, in order.

    Of two ends with the same count and digest, neither has lost, repeated, changed or swapped an order. A digest of
    the standard library: the scheduler's process has no other use for a faster one.
    """

    def __init__(self) -> None:
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, frame: bytes) -> None:
        """One more order. Encodings end where their msgpack ends, so no two streams run together to the same bytes."""
        self._count += 1
        self._hash.update(frame)

    @property
    def count(self) -> int:
        return self._count

    @property
    def digest(self) -> bytes:
        return self._hash.digest()
