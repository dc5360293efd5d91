"""Looks for the KV files of --kv-library, in folders and HTTP stores, and lists those that fit to the scheduler.

each look ─► names: a folder's *.kv, a store's index.json ─► headers, of files that are new or changed
          ─► compared with model, geometry and computation ─► ListKvFiles

A file that does not fit is refused with one line in the log, which names both values; the server goes on without it.
"""

import asyncio
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from headrace.core.config import Config
from headrace.core.messages.frontend import AnyFrontendRequest, ListKvFiles
from headrace.core.messages.replies import StagePools
from headrace.core.stats import Sample
from headrace.core.types.kv.geometry import Component
from headrace.core.types.kv.kv_files import (
    INDEX,
    SUFFIX,
    KvComputation,
    KvFile,
    KvFileError,
    KvFileHeader,
    KvFileIndex,
    file_bytes,
)
from headrace.core.types.kv.kv_tiers import LIBRARY_PAGES
from headrace.engine.kv.tiers.kv_source import HttpSource, SourceError, close_quietly, is_url, open_source, read_header
from headrace.server.frontend.link.scheduler_client import SchedulerClient

log = logging.getLogger(__name__)

READ_S = 20.0  # for the header of a file, or an index
MAX_INDEX_BYTES = 4 << 20
READY_S = 0.2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.kv")
"""Of a file in an index: no path, so that it leads nowhere but beside the index."""

State = Literal["used", "format", "model", "geometry", "computation", "room", "unreadable"]


class Unfit(Exception):
    """Why a file is not used."""

    def __init__(self, state: State, message: str) -> None:
        super().__init__(message)
        self.state = state


class FoundFile(NamedTuple):
    """A file as it was seen: its place, and what changes when its content does."""

    location: str
    stamp: tuple[int | str, ...]


class KvFileWatch:
    """Looks for KV files as long as the server runs."""

    def __init__(self, config: Config, client: SchedulerClient, send: Callable[[AnyFrontendRequest], None]) -> None:
        """client: knows what the stages reported. send: takes messages for the scheduler."""
        self._engine = config.engine
        self._copies = len(config.scheduler.library_salts)
        self._client = client
        self._send = send
        self._known: dict[FoundFile, KvFile | Unfit] = {}
        self._told: dict[str, str] = {}  # refusals in the log, by location
        self._states: Counter[State] = Counter()

    async def run(self) -> None:
        """Look every --kv-library-seconds, once the stages are up."""
        while True:
            pools = None if self._client.server_info is None else self._client.server_info.stages
            if pools is None:
                await asyncio.sleep(READY_S)
                continue
            files = await asyncio.to_thread(self.look, pools)
            self._send(ListKvFiles(files=tuple(files)))
            await asyncio.sleep(self._engine.kv_library_seconds)

    def statistics(self) -> tuple[Sample, ...]:
        """Files by what became of them at the last look."""
        return tuple(Sample("kv_files", self._states[state], (state,)) for state in get_args(State))

    def look(self, pools: StagePools) -> list[KvFile]:
        """The files that fit a server with these pools. Reads headers of files that are new or changed."""
        known, self._known = self._known, {}
        states: Counter[State] = Counter()
        files: list[KvFile] = []
        room = LIBRARY_PAGES
        for found in self._all(states):
            file = known.get(found) or self._read(found, pools)
            if isinstance(file, KvFile):
                needed = len(file.tokens) // 4 // self._engine.page_size * self._copies
                if needed > room:
                    file = Unfit("room", f"{needed} pages; of {LIBRARY_PAGES} in all, {room} are left")
                else:
                    room -= needed
                    files.append(file)
                    self._tell(found.location, f"used, {len(file.tokens) // 4} tokens", logging.INFO)
            if isinstance(file, Unfit):
                self._tell(found.location, f"not used: {file}", logging.WARNING)
            states[file.state if isinstance(file, Unfit) else "used"] += 1
            if not isinstance(file, Unfit) or file.state not in ("unreadable", "room"):
                self._known[found] = file
        self._states = states
        return files

    def _all(self, states: Counter[State]) -> Iterator[FoundFile]:
        """All files of all folders and stores, each once."""
        seen: set[str] = set()
        for place in self._engine.kv_library:
            try:
                listed = list(_in_store(place) if is_url(place) else _in_folder(place))
            except (OSError, SourceError, KvFileError) as error:
                states["unreadable"] += 1
                self._tell(place, f"cannot be looked through: {error}", logging.WARNING)
                continue
            self._told.pop(place, None)
            for found in listed:
                if found.location not in seen:
                    seen.add(found.location)
                    yield found

    def _read(self, found: FoundFile, pools: StagePools) -> KvFile | Unfit:
        source = open_source(found.location)
        try:
            start, header = read_header(source, time.monotonic() + READ_S)
            if is_url(found.location) and found.stamp and found.stamp[-1] != start.digest.hex():
                return Unfit("format", f"its digest is {start.digest.hex()}, {INDEX} says {found.stamp[-1]}")
            if (size := source.size()) != (whole := file_bytes(header, start)):
                return Unfit("format", f"it has {size} bytes; with {header.pages} pages it has {whole}")
            self._compare(header, pools)
        except SourceError as error:
            return Unfit("unreadable", str(error))
        except KvFileError as error:
            return Unfit("format", str(error))
        except Unfit as refusal:
            return refusal
        finally:
            close_quietly(source)
        return KvFile(found.location, start.digest, header.tokens)

    def _compare(self, header: KvFileHeader, pools: StagePools) -> None:
        """Raises Unfit for KV that this server would not have computed, bit for bit."""
        if header.fingerprint != pools.fingerprint:
            raise Unfit("model", f"it is of model {header.fingerprint}, this server's is {pools.fingerprint}")
        if header.page_size != self._engine.page_size:
            raise Unfit("geometry", f"its pages have {header.page_size} tokens, --page-size {self._engine.page_size}")
        if header.tensors != pools.tensors:
            raise Unfit("geometry", f"its pages have {_shown(header.tensors)}, this server's {_shown(pools.tensors)}")
        if self._engine.kv_library_any_cpu:
            return
        for own in pools.computations:
            for name in KvComputation.__struct_fields__:
                if (theirs := getattr(header.computation, name)) != (ours := getattr(own, name)):
                    advice = "--kv-library-any-cpu takes it all the same"
                    raise Unfit("computation", f"its {name} is {theirs!r}, this server's {ours!r}; {advice}")

    def _tell(self, location: str, message: str, level: int) -> None:
        """Log what is new."""
        if self._told.get(location) != message:
            self._told[location] = message
            log.log(level, "KV file %s: %s", location, message)


def _in_folder(place: str) -> Iterator[FoundFile]:
    """The KV files of a folder, or the one that is named. Raises OSError."""
    path = Path(place)
    for each in [path] if place.endswith(SUFFIX) else sorted(path.iterdir()):
        if each.suffix == SUFFIX and each.is_file():
            status = os.stat(each)
            yield FoundFile(str(each.absolute()), (status.st_ino, status.st_size, status.st_mtime_ns))


def _in_store(place: str) -> Iterator[FoundFile]:
    """The KV files of an HTTP store, or the one that is named. Raises SourceError, KvFileError."""
    if place.endswith(SUFFIX):
        yield FoundFile(place, ())
        return
    base = place.rstrip("/")
    data = HttpSource(f"{base}/{INDEX}").read_all(MAX_INDEX_BYTES, time.monotonic() + READ_S)
    try:
        index = msgspec.json.decode(data, type=KvFileIndex)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KvFileError(f"{INDEX}: {error}") from None
    for file in index.files:
        if not NAME.fullmatch(file.name):
            raise KvFileError(f"{INDEX} names {file.name[:100]!r}, which is no name of a KV file beside it")
        yield FoundFile(f"{base}/{file.name}", (file.size, file.digest))


def _shown(tensors: tuple[Component, ...]) -> str:
    return ", ".join(
        f"{each.name} {each.dtype} [{each.layers}, {each.planes}, {each.kv_heads}, {each.head_dim}]" for each in tensors
    )
