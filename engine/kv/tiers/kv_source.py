"""Where KV files are read from: folders of this machine, and HTTP stores, with ranges or without.

Only addresses that are configured are asked: no redirect is followed, and no proxy of the environment. Every read has a
deadline, so that a store that is slow, or silent, costs no more than that.
"""

import http.client
import os
import ssl
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

from headrace.core.types.kv.kv_files import START_BYTES, KvFileHeader, KvFileStart, parse_header, parse_start

SILENCE_S = 5.0  # without a byte, after which a store counts as silent
PART_BYTES = 1 << 18  # read at a time
_FAILURES = (OSError, http.client.HTTPException, ValueError)


class SourceError(Exception):
    """A file cannot be read (in time); the message says why."""


class KvFileSource(Protocol):
    """Reads one file. Used by one thread."""

    def read_into(self, target: memoryview, offset: int, until: float) -> None:
        """Fill target with the bytes of the file from offset on, by the time until (of time.monotonic()). Reading in
        ascending order is fast. Raises SourceError."""
        ...

    def size(self) -> int:
        """Bytes of the whole file, known once something was read. Raises SourceError."""
        ...

    def expect(self, end: int) -> None:
        """What is read next goes up to this offset, without gaps."""
        ...

    def close(self) -> None:
        """Close what is open. It can be read again."""
        ...


def open_source(location: str, clock: Callable[[], float] = time.monotonic) -> KvFileSource:
    """The source of a path or URL. Nothing is read yet."""
    return HttpSource(location, clock) if is_url(location) else FileSource(location)


def is_url(location: str) -> bool:
    """It is the address of an HTTP store, or of a file there."""
    return location.startswith(("http://", "https://"))


class FileSource:
    """A regular file of this machine."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None

    def read_into(self, target: memoryview, offset: int, until: float) -> None:
        """See KvFileSource. The deadline is not needed."""
        at = 0
        try:
            while at < len(target):
                read = os.preadv(self._open(), [target[at:]], offset + at)
                if not read:
                    raise SourceError(f"it ends at {offset + at} bytes")
                at += read
        except OSError as error:
            raise SourceError(error.strerror or str(error)) from error

    def size(self) -> int:
        """See KvFileSource."""
        try:
            return os.fstat(self._open()).st_size
        except OSError as error:
            raise SourceError(error.strerror or str(error)) from error

    def expect(self, end: int) -> None:
        """See KvFileSource: nothing is to be prepared."""

    def close(self) -> None:
        """See KvFileSource."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe does not block
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise SourceError("it is no regular file")
            self._descriptor = descriptor
        return self._descriptor


class HttpSource:
    """A file of an HTTP store, over one connection. Where the store knows no ranges, the file is read from its start up
    to what is wanted, and on from there."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        parts = urlsplit(url)
        self._path = parts.path + (f"?{parts.query}" if parts.query else "")
        host, port = parts.hostname or "", parts.port
        self._clock = clock
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection = http.client.HTTPSConnection(host, port, timeout=SILENCE_S, context=context)
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=SILENCE_S)
        self._response: http.client.HTTPResponse | None = None
        self._at = 0  # offset of the response's next byte
        self._end = 0  # of what is expected to be read
        self._size: int | None = None

    def read_into(self, target: memoryview, offset: int, until: float) -> None:
        """See KvFileSource."""
        try:
            response = self._response
            if response is None or self._at != offset:
                response = self._ask(offset, max(self._end, offset + len(target)), until)
            self._fill(response, target, until)
        except _FAILURES as error:
            self.close()
            raise SourceError(str(error) or type(error).__name__) from error
        except SourceError:
            self.close()
            raise

    def read_all(self, most: int, until: float) -> bytes:
        """The whole file, of so many bytes at most. Raises SourceError."""
        try:
            response = self._get({})
            data = bytearray()
            while part := response.read1(PART_BYTES):
                self._in_time(until)
                data += part
                if len(data) > most:
                    raise SourceError(f"it has more than {most} bytes")
            return bytes(data)
        except _FAILURES as error:
            raise SourceError(str(error) or type(error).__name__) from error
        finally:
            self.close()

    def size(self) -> int:
        """See KvFileSource."""
        if self._size is None:
            raise SourceError("the store does not tell its size")
        return self._size

    def expect(self, end: int) -> None:
        """See KvFileSource."""
        self._end = end

    def close(self) -> None:
        """See KvFileSource."""
        if self._response is not None:
            self._response.close()  # it may have the socket to itself
            self._response = None
        self._connection.close()

    def _ask(self, offset: int, end: int, until: float) -> http.client.HTTPResponse:
        """A response whose next byte is the one at offset."""
        if self._response is not None:
            self.close()
        response = self._get({"Range": f"bytes={offset}-{end - 1}"})
        if response.status == 206:
            found = response.headers.get("Content-Range", "")
            span, _, size = found.removeprefix("bytes ").partition("/")
            if not span.startswith(f"{offset}-"):
                raise SourceError(f"the store sends another range: {found[:100]!r}")
            self._size = int(size) if size.isdecimal() else self._size
        else:
            self._size = response.length if response.length is not None else self._size
            skipped, part = 0, memoryview(bytearray(PART_BYTES))
            while skipped < offset:
                skipped += self._fill(response, part[: min(PART_BYTES, offset - skipped)], until)
        self._at = offset
        return response

    def _get(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection.request("GET", self._path, headers={"Accept-Encoding": "identity", **headers})
        response = self._response = self._connection.getresponse()
        if response.status not in (200, 206):
            raise SourceError(f"the store answers {response.status} {response.reason[:100]}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise SourceError("the store sends the file compressed")
        return response

    def _fill(self, response: http.client.HTTPResponse, target: memoryview, until: float) -> int:
        at = 0
        while at < len(target):
            self._in_time(until)
            part = response.read1(min(PART_BYTES, len(target) - at))
            if not part:
                raise SourceError(f"it ends {len(target) - at} bytes early")
            target[at : at + len(part)] = part
            at += len(part)
        self._at += at
        if response.isclosed() or response.length == 0:  # read to its end: the connection may be used again
            response.close()
            self._response = None
        return at

    def _in_time(self, until: float) -> None:
        if self._clock() > until:
            raise SourceError("the store is too slow")


def read_header(source: KvFileSource, until: float) -> tuple[KvFileStart, KvFileHeader]:
    """Read and parse what a file begins with. Raises SourceError, KvFileError."""
    data = memoryview(bytearray(START_BYTES))
    source.read_into(data, 0, until)
    start = parse_start(bytes(data))
    body = memoryview(bytearray(start.header_bytes))
    source.read_into(body, START_BYTES, until)
    return start, parse_header(bytes(body), start)


def close_quietly(source: KvFileSource) -> None:
    """Close a source that is not needed any more."""
    with suppress(Exception):
        source.close()
