"""Recordings: what a scheduler was given and when, from a snapshot of its state on, and digests of what it decided.

    file      MAGIC, version of the format, header (msgpack), then sections: snapshot, calls, snapshot, calls, …
    section   kind, segment, time, sizes, CRC-32; zlib of frames: a head (msgpack), the blocks of a graph (snapshot.py)
    segment   a snapshot, and the calls from there to the next one

A file may come from anybody: sizes are bounded, nothing in it is run, and all that is wrong with it is a RecordingError
of one line. It is read by the version that wrote it; another one says what it finds different.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Submit
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.requests.request import SendTo
from headrace.scheduler.recording.digest import digest
from headrace.scheduler.recording.snapshot import Rules, SnapshotError, decode, encode
from headrace.scheduler.scheduler import Effect, Event, Scheduler

MAGIC = b"HRRECORD"
FORMAT = 1
SUFFIX = ".recording"
MAX_FILE_BYTES = 4 << 30
MAX_HEADER_BYTES = 1 << 20
MAX_SECTION_BYTES = 1 << 30  # before compression
MAX_SECTIONS = 10_000
LEVEL = 3  # of zlib: about 60 MB/s

Kind = Literal["handle", "plan", "tick"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_START = struct.Struct("<8sII")
_SECTION = struct.Struct("<cIdQQI")  # kind, number of the segment, time, size, packed size, CRC-32
_FRAME = struct.Struct("<I")
_SNAPSHOT, _CALLS = b"S", b"C"


class RecordingError(Exception):
    """The file is no recording, is damaged, or is one that this version cannot read; the message says which."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording says of itself."""

    version: str
    """Of Headrace."""

    python: str
    config: SchedulerConfig
    hidden: bool
    """Token ids are replaced by others (hiding.py)."""

    wall_offset_s: float
    """Seconds since the epoch minus the scheduler's time."""

    server: str = ""
    """Role and address of the server, in words."""

    reason: str = ""
    """Why it was written."""

    written_at: float = 0.0
    """Seconds since the epoch."""


class Call(NamedTuple):
    """One call of the scheduler."""

    kind: Kind
    now: float
    event: Event | None
    """Of handle."""

    digest: int
    """Of its effects; 0 for none."""

    raised: str = ""
    """What it raised, as text; "" for nothing."""


class RecordedCall(NamedTuple):
    """One call as it was made: what is to be written."""

    kind: Kind
    now: float
    event: Event | None
    effects: Sequence[Effect]


class Hides(Protocol):
    """Hiding, or Plain."""

    @property
    def rules(self) -> Rules:
        """For events and state."""
        ...

    def effects(self, effect: Any) -> Any:
        """The effect with its token ids hidden."""
        ...

    def aliases(self, prompts: Iterable[Submit]) -> dict[str, str]:
        """Hashes of hidden prompts, by what is written in the place of the true ones."""
        ...


class _Snapshot(msgspec.Struct, frozen=True):
    aliases: dict[str, str]


class _Calls(msgspec.Struct, frozen=True):
    kinds: bytes
    times: bytes
    digests: bytes
    aliases: dict[str, str]
    raised: str = ""


class RecordedSegment:
    """A snapshot, and the calls that followed it.

    number counts segments from the start of the server: a gap is a part that was not written. began is the scheduler's
    time at the snapshot.
    """

    def __init__(self, snapshot: bytes, calls: bytes | None) -> None:
        """Sections. calls: None where they were not written."""
        _, self.number, self.began, *_ = _SECTION.unpack_from(snapshot)
        self._snapshot = snapshot
        self._calls = calls
        self._hashes = _Hashes([self])

    def restore(self) -> Scheduler:
        """The scheduler as it was when the segment began: a new one each time. Raises RecordingError."""
        frames = _frames(self._snapshot)
        next(frames, None)
        found = _graph(frames, self._hashes.aliases)
        if not isinstance(found, Scheduler):
            raise RecordingError("the recording has no scheduler where one belongs")
        return found

    @cached_property
    def calls(self) -> Sequence[Call]:
        """The calls in order. Raises RecordingError."""
        head = self._calls_head
        if head is None:
            return ()
        frames = _frames(self._calls or b"")
        next(frames)
        count = len(head.kinds)
        if len(head.times) != 8 * count or len(head.digests) != 8 * count:
            raise RecordingError("the recording has calls without a time or a digest")
        events = iter(_graph(frames, self._hashes.aliases))
        found = []
        times, digests = struct.unpack(f"<{count}d", head.times), struct.unpack(f"<{count}Q", head.digests)
        try:
            for kind, now, number in zip(head.kinds, times, digests, strict=True):
                name = KINDS[kind]
                found.append(Call(name, now, next(events) if name == "handle" else None, number))
        except (IndexError, StopIteration):
            raise RecordingError("the recording has calls of no kind, or without their event") from None
        if head.raised and found:
            found[-1] = found[-1]._replace(raised=head.raised)
        return found

    @cached_property
    def _calls_head(self) -> _Calls | None:
        return None if self._calls is None else _head(next(_frames(self._calls), b""), _Calls)

    def aliases(self) -> dict[str, str]:
        """Hashes of the hidden prompts of this segment, those that wait and those that come, by what is written in the
        place of the true ones. Raises RecordingError."""
        found: dict[str, str] = _head(next(_frames(self._snapshot), b""), _Snapshot).aliases
        return found if self._calls_head is None else found | self._calls_head.aliases


class _Hashes:
    """Those of the prompts of several segments: what a prompt is compared with may have come a segment before it."""

    def __init__(self, segments: Sequence[RecordedSegment]) -> None:
        self._segments = segments

    @cached_property
    def aliases(self) -> dict[str, str]:
        """RecordedSegment.aliases() of all of them."""
        return {name: found for each in self._segments for name, found in each.aliases().items()}


def following(segments: Sequence[RecordedSegment]) -> Sequence[RecordedSegment]:
    """These segments, of which a scheduler may go on from each to the next one."""
    hashes = _Hashes(segments)
    for each in segments:
        each._hashes = hashes
    return segments


class Recording(NamedTuple):
    """A file that was read."""

    header: Header
    segments: Sequence[RecordedSegment]


def apply(scheduler: Scheduler, call: Call) -> list[Effect]:
    """Make a call again; digest() of what it returns should be the call's."""
    match call.kind:
        case "handle" if call.event is not None:
            return scheduler.handle(call.event, call.now)
        case "plan":
            return scheduler.plan(call.now)
    return scheduler.tick(call.now)


def read_recording(path: str | Path) -> Recording:
    """Read a file. Raises RecordingError for one that cannot be read, naming it."""
    try:
        return _read(Path(path))
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None


def encode_header(header: Header) -> bytes:
    """The beginning of a file."""
    data = msgspec.msgpack.encode(header)
    return _START.pack(MAGIC, FORMAT, len(data)) + data


def encode_snapshot(number: int, now: float, scheduler: Scheduler, hiding: Hides) -> bytes:
    """The section of the scheduler's state, with which a segment begins. Raises SnapshotError."""
    prompts = (each.submit for each in scheduler._state.requests if isinstance(each.submit.route, SendTo))
    head = _Snapshot(hiding.aliases(prompts))
    return _section(_SNAPSHOT, number, now, head, encode(scheduler, hiding.rules))


def encode_calls(number: int, calls: Sequence[RecordedCall], hiding: Hides, raised: str = "") -> bytes:
    """The section of a segment's calls. raised: by the last one. Raises SnapshotError."""
    events = [call.event for call in calls if call.kind == "handle"]
    digests = [digest([hiding.effects(effect) for effect in call.effects]) for call in calls]
    head = _Calls(
        kinds=bytes(KINDS.index(call.kind) for call in calls),
        times=struct.pack(f"<{len(calls)}d", *(call.now for call in calls)),
        digests=struct.pack(f"<{len(calls)}Q", *digests),
        aliases=hiding.aliases(event for event in events if isinstance(event, Submit)),
        raised=raised,
    )
    now = calls[-1].now if calls else 0.0
    return _section(_CALLS, number, now, head, encode(events, hiding.rules))


def _section(kind: bytes, number: int, now: float, head: msgspec.Struct, blocks: Iterable[bytes]) -> bytes:
    packer, parts, size, crc = zlib.compressobj(LEVEL), [], 0, 0
    for frame in chain([msgspec.msgpack.encode(head)], blocks):
        for piece in (_FRAME.pack(len(frame)), frame):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
            parts.append(packer.compress(piece))
    parts.append(packer.flush())
    data = b"".join(parts)
    return _SECTION.pack(kind, number, now, size, len(data), crc) + data


def _read(path: Path) -> Recording:
    with path.open("rb") as file:
        start = file.read(_START.size)
        if len(start) < _START.size or not start.startswith(MAGIC):
            raise RecordingError("it is no recording")
        _, version, size = _START.unpack(start)
        if version != FORMAT:
            raise RecordingError(f"it has format {version}; this version of Headrace reads format {FORMAT}")
        if size > MAX_HEADER_BYTES:
            raise RecordingError(f"its header has {size} bytes; at most {MAX_HEADER_BYTES} are read")
        header = _head(file.read(size), Header)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RecordingError(f"it has more than {MAX_FILE_BYTES >> 30} GiB")
        return Recording(header, following(_segments(list(_sections(file)))))


def _sections(file: Any) -> Iterator[tuple[bytes, bytes]]:
    """Kinds, and whole sections."""
    for _ in range(MAX_SECTIONS):
        start = file.read(_SECTION.size)
        if not start:
            return
        if len(start) < _SECTION.size:
            raise RecordingError("it ends within a section: it was cut off")
        kind, _, _, size, packed, _ = _SECTION.unpack(start)
        if kind not in (_SNAPSHOT, _CALLS):
            raise RecordingError("it is damaged: there is a section of no kind")
        if max(size, packed) > MAX_SECTION_BYTES:
            raise RecordingError(f"it has a section of more than {MAX_SECTION_BYTES >> 20} MiB")
        data = file.read(packed)
        if len(data) < packed:
            raise RecordingError("it ends within a section: it was cut off")
        yield kind, start + data
    raise RecordingError(f"it has more than {MAX_SECTIONS} sections")


def _segments(sections: list[tuple[bytes, bytes]]) -> list[RecordedSegment]:
    found: list[RecordedSegment] = []
    for at, (kind, section) in enumerate(sections):
        if kind == _SNAPSHOT:
            following = sections[at + 1] if at + 1 < len(sections) else (b"", b"")
            own = following[0] == _CALLS and _number(following[1]) == _number(section)
            found.append(RecordedSegment(section, following[1] if own else None))
    if not found:
        raise RecordingError("it has no segment")
    return found


def _number(section: bytes) -> int:
    return int(_SECTION.unpack_from(section)[1])


def _frames(section: bytes) -> Iterator[bytes]:
    """The frames of a section. Raises RecordingError."""
    *_, size, _, crc = _SECTION.unpack_from(section)
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(section[_SECTION.size :], size + 1)
    except zlib.error as error:
        raise RecordingError(f"it is damaged: {error}") from None
    if len(data) != size or zlib.crc32(data) != crc:
        raise RecordingError("it is damaged: a section has another checksum than is written there")
    at, view = 0, memoryview(data)
    while at < len(data):
        if at + _FRAME.size > size or (end := at + _FRAME.size + _FRAME.unpack_from(data, at)[0]) > size:
            raise RecordingError("it is damaged: a frame goes beyond its section")
        yield bytes(view[at + _FRAME.size : end])
        at = end


def _head(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except NO_MESSAGE as error:
        raise RecordingError(f"it is damaged, or of another version of Headrace: {error}") from None


def _graph(frames: Iterator[bytes], texts: dict[str, str]) -> Any:
    try:
        return decode(frames, texts)
    except SnapshotError as error:
        raise RecordingError(f"it is damaged, or of another version of Headrace: {error}") from None
