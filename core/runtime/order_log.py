"""Count and digest of a stream of orders, which the scheduler and each stage compare."""

import hashlib

DIGEST_BYTES = 8


class OrderLog:
    """Counts the orders of one stream and hashes their encodings, in order.

    Two ends with the same count and digest have seen the same orders: none lost, repeated, changed or reordered.
    BLAKE2b of the standard library is fast enough, so the scheduler process needs no other hash.
    """

    def __init__(self) -> None:
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, frame: bytes) -> None:
        """Add the next order, as encoded. msgpack delimits itself: different streams never have equal bytes."""
        self._count += 1
        self._hash.update(frame)

    @property
    def count(self) -> int:
        """Number of orders so far."""
        return self._count

    @property
    def digest(self) -> bytes:
        """Hash of all orders so far, DIGEST_BYTES long."""
        return self._hash.digest()
