"""msgpack encoding of the tagged message unions; encoders and decoders are reused, as msgspec advises."""

from typing import Generic, TypeVar

import msgspec

M = TypeVar("M")
DecodeError = msgspec.DecodeError  # ValidationError, its subclass, is raised for a well-formed wrong message
NO_MESSAGE = (DecodeError, UnicodeDecodeError, RecursionError)  # whatever msgspec raises for bytes from outside


class Codec(Generic[M]):
    """Encodes and decodes one union of messages. Not thread-safe: each thread makes its own."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> M:
        """Raises DecodeError when the bytes are no message of the union."""
        try:
            return self._decoder.decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"text that is no UTF-8, or too deep a nesting ({error})") from None
