"""Whether a recording gives the same decisions again: digests by second, the first call that differs, a summary."""

import hashlib
from dataclasses import dataclass, field

from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward, ReplicaOrder
from headrace.core.version import headrace_version
from headrace.scheduler.recording.digest import digest
from headrace.scheduler.recording.file import Header, Recording
from headrace.tools.output import table
from headrace.tools.replay.playback import Playback, PlayedCall, Progress, nobody
from headrace.tools.replay.words import called, counted, effects_line, short


@dataclass(slots=True)
class SecondDigest:
    """The calls of one second of a recording."""

    second: int
    calls: int = 0
    recorded: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=8))
    replayed: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def add(self, step: PlayedCall) -> None:
        """Take in a call."""
        self.calls += 1
        self.recorded.update(b"%d," % step.call.digest)
        self.replayed.update(b"%d," % (step.call.digest if step.equal else digest(step.effects)))

    @property
    def equal(self) -> bool:
        """All of its calls had the recorded effects."""
        return self.recorded.digest() == self.replayed.digest()


@dataclass(slots=True)
class Verdict:
    """What came of replaying a recording."""

    calls: int = 0
    arrivals: int = 0
    open_before: int = 0
    """Requests that were here when the recording began."""

    passes: int = 0
    seconds: list[SecondDigest] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """The first call of each segment whose effects differ, in words."""

    crashes: list[str] = field(default_factory=list)
    """Calls in which the scheduler raised the exception that was recorded."""

    @property
    def equal(self) -> bool:
        """Every call had the recorded effects."""
        return not self.differences


def check(recording: Recording, progress: Progress = nobody) -> tuple[Verdict, Playback]:
    """Replay all calls."""
    playback, verdict = Playback(recording, progress), Verdict()
    verdict.open_before = sum(not request.ended for request in playback.scheduler.state.requests)
    differed = -1  # segment
    for step in playback:
        _count(verdict, playback, step)
        segment = playback.segment_of(step.position)
        if not step.equal and segment != differed:
            differed = segment
            verdict.differences.append(_difference(playback, step))
        elif step.raised and step.equal:
            verdict.crashes.append(_difference(playback, step))
    return verdict, playback


def _count(verdict: Verdict, playback: Playback, step: PlayedCall) -> None:
    verdict.calls += 1
    verdict.arrivals += isinstance(step.call.event, Submit)
    for effect in step.effects:
        order = effect.order if isinstance(effect, ReplicaOrder) else effect
        verdict.passes += isinstance(order, Forward)
    second = int(playback.since(step.call.now))
    if not verdict.seconds or verdict.seconds[-1].second != second:
        verdict.seconds.append(SecondDigest(second))
    verdict.seconds[-1].add(step)


def _difference(playback: Playback, step: PlayedCall) -> str:
    at, segment = playback.since(step.call.now), playback.segment_of(step.position)
    what = called(step.call, playback.name_of)
    recorded = f" (recorded: {short(step.call.raised)})" if step.call.raised and not step.equal else ""
    decided = f"raised {step.raised}" if step.raised else effects_line(step.effects, playback.name_of, 12)
    return f"call {step.position:,} at {at:.3f} s, segment {segment}: {what}\n  now: {decided}{recorded}"


def as_text(name: str, verdict: Verdict, playback: Playback, *, verbose: bool) -> str:
    """The result in words; verbose: with the digest of every second."""
    header = playback.recording.header
    here, there = headrace_version(), short(header.version)
    tokens = "token ids hidden" if header.hidden else "with token ids"
    segments = len(playback.recording.segments)
    parts = counted(segments, "segment")
    lines = [
        f"{name}{_about(header)}: {counted(len(playback), 'call')} in {parts}, {playback.seconds:.1f} s from "
        f"{playback.wall(playback.began)}; recorded by headrace {there}, {tokens}",
        f"{verdict.arrivals:,} requests arrive, {verdict.open_before:,} were here before; {verdict.passes:,} forward "
        "passes",
    ]
    if verbose:
        rows = [["second", "calls", "digest", ""]]
        for one in verdict.seconds:
            result = "equal" if one.equal else f"differs: {one.replayed.hexdigest()}"
            rows.append([str(one.second), f"{one.calls:,}", one.recorded.hexdigest(), result])
        lines += ["", table(rows, left=0), ""]
    if here != there:
        lines.append(
            f"It was recorded by headrace {there} and replayed by {here}: equal digests are promised within one "
            "release only. Where they differ, this release decides otherwise"
        )
    lines += [f"different: {text}" for text in verdict.differences]
    lines += [f"raises an exception, as it did then: {text}" for text in verdict.crashes]
    if verdict.equal:
        lines.append(f"The same decisions again: the effects of all {verdict.calls:,} calls have the recorded digests")
    else:
        lines.append("The decisions differ from the recorded ones")
    return "\n".join(lines)


def _about(header: Header) -> str:
    """Whose recording it is, and why it was written."""
    parts = [short(part) for part in (header.server, header.reason) if part]
    return f" ({'; '.join(parts)})" if parts else ""
