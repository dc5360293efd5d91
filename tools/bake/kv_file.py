"""Writes, shows and verifies KV files, and the index of a folder of them."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_files import (
    INDEX,
    MAX_HEADER_BYTES,
    SUFFIX,
    IndexEntry,
    KvFileError,
    KvFileHeader,
    KvFileIndex,
    KvFileStart,
    file_bytes,
    pack_start,
)
from headrace.core.types.packed import unpack
from headrace.engine.kv.tiers.kv_source import FileSource, KvFileSource, SourceError, read_header

READ_S = 3600.0


def write_kv_file(path: Path, header: KvFileHeader, pages: Iterable[Sequence[Any]]) -> int:
    """Write a file, whole or not at all. pages: parts of each, in order. Returns its bytes. Raises ConfigError."""
    try:
        start = pack_start(header)
    except KvFileError as error:
        raise ConfigError(f"-o {path}: {error}; the limit of a header is {MAX_HEADER_BYTES} bytes") from error

    def write(descriptor: int) -> None:
        with os.fdopen(descriptor, "wb") as file:
            file.write(start)
            for page in pages:
                for part in page:
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())

    _replace(path, write)
    return path.stat().st_size


def write_index(folder: Path) -> KvFileIndex:
    """Write the index of the KV files in a folder. Raises ConfigError for one that is none."""
    entries = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.is_file())
    except OSError as error:
        raise ConfigError(f"--index {folder}: {error.strerror}") from error
    for path in paths:
        start, header = _open(path, "--index")[1:]
        entries.append(IndexEntry(path.name, file_bytes(header, start), start.digest.hex()))
    index = KvFileIndex(tuple(entries))

    def write(descriptor: int) -> None:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")

    _replace(folder / INDEX, write)
    return index


def describe(path: Path) -> dict[str, Any]:
    """What a file holds, without its pages. Raises ConfigError."""
    _, start, header = _open(path, "--show")
    return {
        "digest": start.digest.hex(),
        "bytes": file_bytes(header, start),
        "pages_at": start.pages_at,
        "model": header.model,
        "fingerprint": header.fingerprint,
        "salt": header.salt,
        "page_size": header.page_size,
        "pages": header.pages,
        "page_bytes": header.page_bytes,
        "tensors": msgspec.to_builtins(header.tensors),
        "computation": msgspec.to_builtins(header.computation),
        "last_page": header.digests[-32:].hex(),
        "tokens": unpack(header.tokens).tolist(),
    }


def verify(path: Path, progress: Callable[[int, int], None]) -> KvFileHeader:
    """Read a file to its end. progress: of pages, and how many there are. Raises ConfigError for a damaged one."""
    source, start, header = _open(path, "--verify")
    with _closing(source):
        whole, size = file_bytes(header, start), source.size()
        if size != whole:
            raise ConfigError(f"--verify {path}: it has {size} bytes; with {header.pages} pages it has {whole}")
        page = memoryview(bytearray(header.page_bytes))
        for index in range(header.pages):
            source.read_into(page, start.pages_at + index * header.page_bytes, time.monotonic() + READ_S)
            if sha256(page).digest() != header.checksum(index):
                raise ConfigError(f"--verify {path}: page {index} was changed: its SHA-256 is another one")
            progress(index + 1, header.pages)
    return header


def _open(path: Path, option: str) -> tuple[KvFileSource, KvFileStart, KvFileHeader]:
    """Raises ConfigError."""
    source = FileSource(str(path))
    try:
        return source, *read_header(source, time.monotonic() + READ_S)
    except (SourceError, KvFileError) as error:
        source.close()
        raise ConfigError(f"{option} {path}: {error}") from error


class _closing:
    def __init__(self, source: KvFileSource) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._source.close()


def _replace(path: Path, write: Callable[[int], None]) -> None:
    """Write a file beside the path, and put it there once it is whole. Raises ConfigError."""
    name = ""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.absolute().parent)
        os.fchmod(descriptor, 0o644)
        write(descriptor)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            os.unlink(name)
