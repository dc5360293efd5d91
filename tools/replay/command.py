"""`headrace replay`: opens a recording and answers what was asked of it."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.output import say
from headrace.core.types.errors import ConfigError
from headrace.core.version import headrace_version
from headrace.scheduler.recording.file import Recording, RecordingError, read_recording
from headrace.tools.output import ProgressLine, check_output, check_plotting, write_json
from headrace.tools.replay import check, counterfactual, moment, options, picture, steps, story
from headrace.tools.replay.playback import Playback, Progress
from headrace.tools.replay.timeline import RecordedTimeline, gather
from headrace.tools.replay.words import short
from headrace.tools.simulate import options as simulate_options

PROGRESS_S = 0.2  # between two updates of the line
DIFFERENT = 1
"""Exit status where the decisions are not the recorded ones."""

PICTURES = (".png", ".html")
LONGEST = 300  # characters of what is wrong with a file
_OF_FOREIGN_STATE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What looking at a state may raise that no scheduler of this release could have: a file may come from anybody."""


def main(given: argparse.Namespace) -> int:
    """Run the command. Returns 0, or DIFFERENT where effects are not the recorded ones; raises ConfigError for a wrong
    flag, file or request."""
    path = Path(given.recording)
    _check_flags(given)
    recording = _read(path)
    line = ProgressLine(sys.stderr, SystemClock(), PROGRESS_S)

    def progress(what: str, done: int, of: int) -> None:
        line.show(f"{what}: {done:,} of {of:,}, {100 * done // of} %")

    try:
        text, status = _answer(path.name, recording, given, progress)
    except RecordingError as error:
        raise ConfigError(f"{path}: {_line(error)}{_version(recording)}") from error
    except _OF_FOREIGN_STATE as error:
        what = f"its state is none that this release knows ({type(error).__name__}: {_line(error)})"
        raise ConfigError(f"{path}: {what}{_version(recording)}") from error
    finally:
        line.close()
    say(text)
    return status


def _answer(name: str, recording: Recording, given: argparse.Namespace, progress: Progress) -> tuple[str, int]:
    """What is to be printed, and the exit status."""
    match given.question:
        case "why":
            return story.tell(Playback(recording, progress), story.find(recording, given.request)), 0
        case "diff":
            return _diff(name, recording, vars(given), progress), 0
        case "picture":
            return _picture(name, recording, given, progress), 0
        case _ if given.step or given.at is not None:
            return _look(recording, given), 0
    verdict, playback = check.check(recording, progress)
    return check.as_text(name, verdict, playback, verbose=given.verbose), 0 if verdict.equal else DIFFERENT


def _read(path: Path) -> Recording:
    try:
        return read_recording(path)
    except RecordingError as error:
        raise ConfigError(_line(error)) from error


def _line(error: Exception) -> str:
    """What is wrong with a file, which may have any text in it."""
    return " ".join(str(error).split())[:LONGEST]


def _version(recording: Recording) -> str:
    """Which releases have written and read a file, if they are two."""
    here, there = headrace_version(), short(recording.header.version)
    return "" if here == there else f" (it was recorded by headrace {there}; this is {here})"


def _check_flags(given: argparse.Namespace) -> None:
    for flag in ("verbose", "at", "step"):
        if given.question is not None and getattr(given, flag):
            raise ConfigError(f"--{flag} does not go with {given.question}; leave one of them out")


def _look(recording: Recording, given: argparse.Namespace) -> str:
    """The state at a time, or the calls from there on."""
    playback = Playback(recording)
    if given.at is not None:
        playback.seek(playback.position_at(_seconds("--at", given.at, playback)))
    if not given.step:
        return moment.as_text(playback)
    if sys.stdin.isatty() and sys.stdout.isatty():
        steps.interact(playback, input, sys.stdout)
        return "left"
    for line in steps.listing(playback):
        say(line)
    return "the recording ends here"


def _seconds(flag: str, text: str, playback: Playback) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= playback.seconds:
        raise ConfigError(f"{flag}: expected seconds from 0 to {playback.seconds:.3f}, the length of it, got {text!r}")
    return value


def _picture(name: str, recording: Recording, given: argparse.Namespace, progress: Progress) -> str:
    path = check_output("-o", given.output)
    assert path is not None, "argparse asks for it"
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"-o: expected a file name that ends in {' or '.join(PICTURES)}, got {given.output!r}")
    if path.suffix.lower() == ".png":
        check_plotting(path)
    timeline, playback = gather(recording, progress)
    start, end = picture.whole(timeline)
    start = start if given.start is None else _seconds("--from", given.start, playback)
    end = end if given.end is None else _seconds("--to", given.end, playback)
    if start >= end and (given.start is not None or given.end is not None):
        raise ConfigError(f"--from and --to: there is nothing from {start:g} s to {end:g} s")
    wall = playback.wall(playback.began)
    passes = len({one.seq for one in timeline.passes})
    title = f"{name}: {len(timeline.lives):,} requests, {passes:,} passes, from {wall}"
    picture.draw(timeline, title, path, picture.Window(start, end))
    return f"wrote {path}"


def _diff(name: str, recording: Recording, given: Mapping[str, Any], progress: Progress) -> str:
    json_file = check_output("--json", given["json"])
    retries = simulate_options.parse_whole("--retries", given["retries"]) or 0
    timeline, playback = gather(recording, progress)
    state = playback.scheduler.state
    longest = max((_length(timeline, number) for number in range(len(timeline.lives))), default=1)
    config, host_pages = counterfactual.as_recorded(state, longest)
    asked = {setting.key: given[setting.key] for setting in options.DIFFED if setting.key in given}
    named = asked | {key: given[key] for key in ("replicas", "router") if given[key] is not None}
    recorded = {"replicas": str(state.config.dp), "router": "score"}
    others = dict.fromkeys(("siblings", "returns", "open", "parts", "hints", "remote", "load", "hedge"))
    (first,) = simulate_options.combinations(recorded | others, config, host_pages)
    combinations = simulate_options.combinations(recorded | others | named, config, host_pages)
    points = counterfactual.points_of(named, combinations, first)
    found = counterfactual.compare(name, timeline, state, points, retries, progress)
    write_json(json_file, found)
    return counterfactual.as_text(found)


def _length(timeline: RecordedTimeline, number: int) -> int:
    life = timeline.lives[number]
    return life.prompt_tokens + max(life.tokens, life.submit.sampling.max_tokens)
