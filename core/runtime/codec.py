"""msgpack encoding of tagged message unions; encoders and decoders are reused, as msgspec recommends."""

from typing import Generic, TypeVar

import msgspec

M = TypeVar("M")
DecodeError = msgspec.DecodeError  # its subclass ValidationError is raised for well-formed msgpack that is no message
NO_MESSAGE = (DecodeError, UnicodeDecodeError, RecursionError)  # all that msgspec raises for untrusted bytes


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
