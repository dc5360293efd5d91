"""Recordings as files with several segments, as those of servers that have run for a while."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from headrace.core.version import headrace_version
from headrace.scheduler.recording.file import (
    RecordedCall,
    Recording,
    apply,
    encode_calls,
    encode_header,
    encode_snapshot,
    read_recording,
)
from headrace.scheduler.recording.hiding import Plain
from tests.scheduler import recordings
from tests.scheduler.recordings import Tape

WALL_S = 1_764_000_000.0  # 2025-11-24 16:00 UTC
EVERY = 40  # calls of a segment


def taped(*, hidden: bool = True, first: int = 0) -> AbstractContextManager[list[Tape]]:
    """Tapes of all schedulers that are made meanwhile, from a call on. They are there when it has ended."""
    return recordings.taped(lambda: (first,), lambda: hidden)


def write(
    tape: Tape,
    folder: Path,
    name: str = "incident.recording",
    *,
    every: int = EVERY,
    version: str = "",
    raised: str = "",
) -> Path:
    """Write a tape to a file. version: of the release that says to have written it. raised: by the last call."""
    path = folder / name
    tape.header = msgspec.structs.replace(
        tape.header,
        version=version or headrace_version(),
        wall_offset_s=WALL_S,
        server="prefill server",
        reason="a test",
    )
    assert tape.write(path, raised)
    if not raised:
        path.write_bytes(b"".join(_divided(read_recording(path), every)))
    return path


def _divided(recording: Recording, every: int) -> Iterator[bytes]:
    """The recording of one segment with a segment for so many calls: they are made again, and recorded as they are."""
    (segment,) = recording.segments
    scheduler, calls, plain = segment.restore(), segment.calls, Plain()
    yield encode_header(recording.header)
    for number, start in enumerate(range(0, len(calls), every)):
        now = calls[start].now
        yield encode_snapshot(number, now, scheduler, plain)
        made = [
            RecordedCall(call.kind, call.now, call.event, apply(scheduler, call))
            for call in calls[start : start + every]
        ]
        yield encode_calls(number, made, plain)
