"""Content codings of request bodies (RFC 9110, section 8.4): gzip and deflate, decoded in pieces of bounded size. Pure.

A codec that Python 3.11 does not have (zstd, br) is refused with the names of those that are taken, which clients read.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid

ACCEPTED = "gzip, deflate"
PIECE = 256 << 10  # bytes decoded in one step; a thousandth of them may have come
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Decoder(Protocol):
    """Makes the bytes of a body of those that come."""

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """What a part stands for, in pieces. Raises HeadraceError (400)."""

    def finish(self) -> None:
        """The last part has come. Raises HeadraceError (400)."""


def body_decoder(content_encodings: Sequence[str]) -> Decoder | None:
    """The decoder for the values of Content-Encoding; None for a body as it is. Raises HeadraceError (415)."""
    names = [name.strip().lower() for value in content_encodings for name in value.split(",")]
    match [name for name in names if name not in ("", "identity")]:
        case []:
            return None
        case [name] if name in _WINDOWS:
            return _Inflater(name)
        case codings:
            message = (
                f"the body has the Content-Encoding {', '.join(codings)!r}, and what is decoded here is one of "
                f"{ACCEPTED}; send it so, or as it is"
            )
            raise HeadraceError(ErrorInfo(code="unsupported_content_encoding", message=message, status=415))


class _Inflater:
    def __init__(self, name: str) -> None:
        self._name = name
        self._stream = zlib.decompressobj(_WINDOWS[name])

    def pieces(self, part: bytes) -> Iterator[bytes]:
        piece = b""
        while part or (len(piece) == PIECE and not self._stream.eof):  # after a whole piece more may follow by itself
            if self._stream.eof:
                raise self._broken("something follows its end")
            try:
                piece = self._stream.decompress(part, PIECE)
            except zlib.error as error:
                raise self._broken(str(error)) from error
            yield piece
            part = self._stream.unconsumed_tail or self._stream.unused_data

    def finish(self) -> None:
        if not self._stream.eof:
            raise self._broken("it ends too early")

    def _broken(self, why: str) -> HeadraceError:
        return invalid("body", f"the body is no valid {self._name}, which its Content-Encoding names: {why}")
