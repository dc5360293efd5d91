"""Going through a recording call by call: on a terminal forward and back, elsewhere as a listing."""

from collections.abc import Callable, Iterator
from typing import TextIO

from headrace.tools.replay import moment
from headrace.tools.replay.playback import Playback
from headrace.tools.replay.words import NOTHING, called, effects_line

HELP = (
    "Enter: next call   N: N calls   -, -N: back   @SECONDS: go there   /RID: next call that names the request   "
    "s: state   q: quit"
)
PROMPT = "step> "


def listing(playback: Playback) -> Iterator[str]:
    """A line for each call from the position on, but for those of plan() that had nothing to decide."""
    while playback.position < len(playback):
        silent = playback.call(playback.position).kind == "plan"
        shown = line(playback)
        if not (silent and shown.endswith(NOTHING)):
            yield shown


def line(playback: Playback) -> str:
    """Apply the next call, and say what came of it."""
    position, call = playback.position, playback.call(playback.position)
    what = called(call, playback.name_of)  # as requests are called before it
    step = playback.step()
    assert step is not None, "there is a next call"
    mark = "" if step.equal else "  (not as recorded)"
    decided = f"raised {step.raised}" if step.raised else effects_line(step.effects, playback.name_of)
    return f"{position:>8,}  {playback.since(call.now):10.4f} s  {what} → {decided}{mark}"


def interact(playback: Playback, ask: Callable[[str], str], out: TextIO) -> None:
    """Obey what is typed, until q or the end of the input."""

    def show(text: str) -> None:
        out.write(f"{text}\n")
        out.flush()

    show(moment.as_text(playback))
    show(HELP)
    while True:
        try:
            typed = ask(PROMPT).strip()
        except EOFError:
            return
        if typed == "q":
            return
        show(_obeyed(playback, typed))


def _obeyed(playback: Playback, typed: str) -> str:
    """The answer to a line that was typed."""
    if typed == "s":
        return moment.as_text(playback)
    if typed.startswith("@") and (seconds := _number(typed[1:])) is not None:
        playback.seek(playback.position_at(seconds))
        return moment.as_text(playback)
    if typed.startswith("/") and len(typed) > 1:
        return _until(playback, typed[1:])
    if typed.startswith("-") and (typed == "-" or typed[1:].isdecimal()):
        playback.seek(playback.position - int(typed[1:] or "1"))
        return moment.as_text(playback)
    if typed == "" or typed.isdecimal():
        return "\n".join(_next(playback, int(typed or "1")))
    return HELP


def _next(playback: Playback, count: int) -> Iterator[str]:
    for _ in range(count):
        if playback.position == len(playback):
            yield "the recording ends here"
            return
        yield line(playback)


def _until(playback: Playback, rid: str) -> str:
    """The next call whose event or effects name a request."""
    while playback.position < len(playback):
        found = line(playback)
        if rid in found:
            return found
    return "the recording ends here"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
