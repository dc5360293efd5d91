"""msgpack encoding of tagged message unions, and the count and digest of a stream of orders.

Encoders and decoders are reused, as msgspec recommends. The scheduler and each stage compare the digests (OrderLog).
"""

import hashlib
from typing import Generic, TypeVar

import msgspec

M = TypeVar("M")
DecodeError = msgspec.DecodeError  # its subclass ValidationError is raised for well-formed msgpack that is no message
NO_MESSAGE = (DecodeError, UnicodeDecodeError, RecursionError)  # all that msgspec raises for untrusted bytes
DIGEST_BYTES = 8


class Codec(Generic[M]):
    """Encodes and decodes the messages of one union. Not thread-safe: each thread makes its own."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def encode(self, message: M) -> bytes:
        """Returns the message as msgpack."""
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> M:
        """Returns the message. Raises DecodeError when the bytes are no message of the union."""
        try:
            return self._decoder.decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"invalid UTF-8, or nested too deeply ({error})") from None


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
