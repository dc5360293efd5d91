"""The report of a soak, as text."""

from tests.soak.coverage import ENTERED, LEFT
from tests.soak.run import Summary
from tests.soak.transitions import DECLARED, undeclared
from tests.soak.worker import Failure


def failure_text(failure: Failure) -> str:
    """A failure: what was broken, what runs it again, and a test of it."""
    lines = [f"seed {failure.seed} broke a guarantee:", *(f"    {problem}" for problem in failure.problems)]
    lines += ["  again:", f"    {failure.command}"]
    lines += [f"  recorded: {path}" for path in failure.recordings]
    if failure.test:
        lines += [f"  as a test (after {failure.runs} schedules of shrinking):"]
        lines += [f"    {line}" for line in failure.test.splitlines()]
    return "\n".join(lines)


def report_text(summary: Summary, command: str) -> str:
    """Everything about a soak."""
    last = min(summary.next_seeds.values(), default=summary.first_seed)
    parts = [
        f"# Soak: {summary.schedules} schedules, {len(summary.failures)} failures"
        f"{', interrupted' if summary.interrupted else ''}",
        f"command: {command}\n"
        f"seeds: from {summary.first_seed}, every one below {last}\n"
        f"time: {summary.seconds:.0f} s, {sum(summary.cpu_s.values()):.0f} s of CPU in {summary.processes} processes\n"
        f"rate: {summary.schedules / max(1e-9, summary.seconds):.0f}/s, {summary.cpu_ms:.2f} ms of CPU each",
        *(f"LOST: {text}" for text in summary.lost),
        *(failure_text(failure) for failure in summary.failures),
        *([_replays(summary)] if summary.what == "replays" else [_transitions(summary), _arrivals(summary)]),
        "## How requests ended\n\n" + "\n".join(f"{n:>9}  {name}" for name, n in sorted(summary.outcomes.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _replays(summary: Summary) -> str:
    lines = [f"{count:>12}  {name}" for name, count in summary.replays.items()]
    return "\n".join(
        ["## Recorded, and made again from a random call on, and in some schedules from the first", "", *lines]
    )


def _transitions(summary: Summary) -> str:
    seen = summary.seen
    missing = sorted(transition for transition in DECLARED if transition not in seen)
    unknown = sorted(undeclared(seen))
    lines = [f"## Transitions: {len(DECLARED) - len(missing)} seen of {len(DECLARED)} declared", ""]
    lines += ["Declared and never seen:" + ("" if missing else " none")]
    lines += [f"    {_line(*transition)}" for transition in missing]
    lines += ["Seen and not declared:" + ("" if unknown else " none")]
    lines += [f"    {_line(*transition)}" for transition in unknown]
    lines += ["", *(f"{count:>9}  {_line(*transition)}" for transition, count in sorted(seen.items()))]
    return "\n".join(lines)


def _line(machine: str, before: str, event: str, after: str) -> str:
    return f"{machine}: {'new' if before == ENTERED else before} -> {after if after != LEFT else 'gone'} by {event}"


def _arrivals(summary: Summary) -> str:
    """A matrix: events about a request, by the phase that it was in."""
    phases = sorted({phase for phase, _ in summary.arrivals})
    lines = ["## Events by the phase of their request", "", f"{'':>18}" + "".join(f"{phase:>12}" for phase in phases)]
    for event in sorted({event for _, event in summary.arrivals}):
        counts = "".join(f"{summary.arrivals.get((phase, event), 0):>12}" for phase in phases)
        lines.append(f"{event:>18}{counts}")
    return "\n".join(lines)
