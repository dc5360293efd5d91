"""Which stages do not answer the scheduler, why, and since when: core/runtime/liveness.py for every rank of the group.

A local stage is looked at in /proc while it does not answer. It counts as dead after silence_s in which it could have
answered, or after hang_s in all. Of a stage on another machine only its silence is known.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.core.messages.stage_events import StageFailed, StageSilence
from headrace.core.runtime.liveness import Activity, Cause, Finding, Limits, Silence
from headrace.core.stats import Counters, Sample
from headrace.core.types.ranks.layout import Layout

log = logging.getLogger(__name__)

FIRST_LOOK_S = 0.25  # after a heartbeat without an answer: what the process does is compared with this look
NEXT_LOOK_S = 1.0

Inspect = Callable[[int], Activity | None]
"""What the process with this id does; None if that cannot be known."""


class _Rank(NamedTuple):
    silence: Silence
    pid: int | None


class StageSilences:
    """The silences of the stages of one group.

    Args:
        layout: of the ranks, for their names in messages.
        limits: of a silence.
        inspect: reads what a local process does.
    """

    def __init__(self, layout: Layout, limits: Limits, inspect: Inspect) -> None:
        self._layout = layout
        self._limits = limits
        self._inspect = inspect
        self._ranks: dict[int, _Rank] = {}
        self._reported: dict[int, Cause] = {}  # by rank, of silences that the scheduler was told of
        self._counters = Counters()

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is watched."""
        return rank in self._ranks

    def __bool__(self) -> bool:
        """Whether any rank is watched."""
        return bool(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are watched."""
        return tuple(self._ranks)

    @property
    def waiting(self) -> bool:
        """Whether a local rank owes an answer."""
        return any(rank.silence.asking and rank.pid is not None for rank in self._ranks.values())

    def watch(self, rank: int, pid: int | None, now: float) -> None:
        """A rank is up. pid: of its process, if that is on this machine."""
        self._ranks[rank] = _Rank(Silence(self._limits, now), pid)

    def forget(self, rank: int) -> None:
        """A rank has failed."""
        self._ranks.pop(rank, None)
        self._reported.pop(rank, None)

    def clear(self) -> None:
        """The group has ended."""
        self._ranks.clear()
        self._reported.clear()

    def heard(self, rank: int, now: float) -> Iterable[StageSilence]:
        """A rank has said something: the end of its silence, if one was reported."""
        self._ranks[rank].silence.heard(now)
        if (cause := self._reported.pop(rank, None)) is None:
            return ()
        log.info("%s answers again; it was %s", self._layout.name(rank), cause.value)
        return (StageSilence(stage=rank, reason=""),)

    def asked(self, rank: int, now: float) -> None:
        """A rank was sent a heartbeat."""
        self._ranks[rank].silence.asked(now)

    def excuse(self, seconds: float, now: float) -> None:
        """The scheduler itself did not run for so long."""
        for rank in self._ranks.values():
            rank.silence.excuse(seconds, now)

    def look(self, now: float) -> list[StageFailed | StageSilence]:
        """Judge every rank that owes an answer. Those that hang are watched no longer."""
        events: list[StageFailed | StageSilence] = []
        for rank, (silence, pid) in list(self._ranks.items()):
            if not silence.asking and pid is not None:
                continue
            found = silence.look(now, self._inspect(pid) if pid is not None else None)
            if found.hung:
                message = f"{self._layout.name(rank)} {found.text}"
                log.error("%s", message)
                self.forget(rank)
                events.append(StageFailed(stage=rank, message=message))
            elif self._matters(found):
                self._note(rank, found)
                events.append(StageSilence(stage=rank, reason=found.text))
        return events

    def statistics(self) -> tuple[Sample, ...]:
        """Counters for /metrics."""
        return self._counters.snapshot()

    def _matters(self, found: Finding) -> bool:
        """Whether requests have to wait for this stage: it is stopped, or silent for so long that it would be dead
        without its excuse."""
        return found.cause is Cause.STOPPED or (
            found.cause is not Cause.UNKNOWN and found.silent_s > self._limits.silence_s
        )

    def _note(self, rank: int, found: Finding) -> None:
        if self._reported.get(rank) is not found.cause:
            self._reported[rank] = found.cause
            self._counters.add("stage_silences_total", labels=(str(rank), found.cause.value))
            log.warning("%s %s; its requests wait", self._layout.name(rank), found.text)
