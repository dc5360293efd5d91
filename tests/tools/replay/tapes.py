"""Recordings of schedulers that tests drive: what each of them is given and decides is written as the recorder does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headrace.core.version import headrace_version
from headrace.scheduler.recording.file import (
    Header,
    Kind,
    RecordedCall,
    encode_calls,
    encode_header,
    encode_snapshot,
)
from headrace.scheduler.recording.hiding import Hiding, Plain
from headrace.scheduler.scheduler import Effect, Event, Scheduler

WALL_S = 1_764_000_000.0
SUFFIX = ".recording"


class Tape:
    """One scheduler's recording: a segment for every so many calls."""

    def __init__(self, scheduler: Scheduler, every: int, *, hidden: bool) -> None:
        self.scheduler = scheduler
        self.config = config = scheduler.state.config
        self._every = every
        self._hiding = Hiding(bytes(range(32)), config.vocab_size, config.page_size) if hidden else Plain()
        self._hidden = hidden
        self._number = 0
        self._calls: list[RecordedCall] = []
        self.count = 0
        self._sections = [encode_snapshot(0, 0.0, scheduler, self._hiding)]

    def keep(self, kind: Kind, now: float, event: Event | None, effects: list[Effect]) -> None:
        """A call was made."""
        self._calls.append(RecordedCall(kind, now, event, list(effects)))
        self.count += 1
        if len(self._calls) == self._every:
            self._cut(now)

    def _cut(self, now: float) -> None:
        self._sections.append(encode_calls(self._number, self._calls, self._hiding))
        self._number += 1
        self._sections.append(encode_snapshot(self._number, now, self.scheduler, self._hiding))
        self._calls.clear()

    def data(self, version: str = "", raised: str = "") -> bytes:
        """The whole file. raised: by the last call."""
        header = Header(
            version=version or headrace_version(),
            python="3",
            config=self.config,
            hidden=self._hidden,
            wall_offset_s=WALL_S,
            server="prefill server",
            reason="a test",
            written_at=WALL_S + 60.0,
        )
        last = [encode_calls(self._number, self._calls, self._hiding, raised)] if self._calls else []
        return b"".join([encode_header(header), *self._sections, *last])

    def write(self, folder: Path, name: str = f"incident{SUFFIX}", **fields: str) -> Path:
        """Write it to a file."""
        path = folder / name
        path.write_bytes(self.data(**fields))
        return path


@contextmanager
def taped(every: int = 1 << 30, *, hidden: bool = True) -> Iterator[list[Tape]]:
    """The tapes of all schedulers that are called meanwhile, in the order of their first calls."""
    tapes: dict[int, Tape] = {}

    def keeping(kind: Kind, original: Callable[..., list[Effect]]) -> Callable[..., list[Effect]]:
        def call(scheduler: Scheduler, *arguments: Any) -> list[Effect]:
            tape = tapes.get(id(scheduler))
            if tape is None:
                tape = tapes[id(scheduler)] = Tape(scheduler, every, hidden=hidden)
                found.append(tape)
            effects = original(scheduler, *arguments)
            event = arguments[0] if kind == "handle" else None
            tape.keep(kind, arguments[-1], event, effects)
            return effects

        return call

    found: list[Tape] = []
    kinds: tuple[Kind, ...] = ("handle", "plan", "tick")
    patches = [patch.object(Scheduler, kind, keeping(kind, getattr(Scheduler, kind))) for kind in kinds]
    for one in patches:
        one.start()
    try:
        yield found
    finally:
        for one in patches:
            one.stop()
