"""Checks a trace against Chrome's Trace Event Format, event by event."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
PHASES = {"M", "X", "b", "e", "s", "f", "C", "i"}
EXACT_US = 0.0005  # half of the resolution that a nanosecond has in the file
TrackId = tuple[int, int]


def check(trace: dict[str, Any]) -> None:
    """Raises AssertionError for anything that a viewer would show wrongly or drop."""
    events: list[Event] = trace["traceEvents"]
    assert {event["ph"] for event in events} <= PHASES
    timed = [event for event in events if event["ph"] != "M"]
    for event in timed:
        assert event["ts"] >= 0, event
        assert isinstance(event["name"], str)
    _tracks(timed)
    _named(events)
    spans = _spans(timed)
    _pairs(timed)
    _arrows(timed, spans)
    for event in timed:
        if event["ph"] == "C":
            assert event["args"], event
            assert all(isinstance(value, int) for value in event["args"].values()), event


def of(trace: dict[str, Any], phase: str, name: str = "", pid: int = 0) -> list[Event]:
    """Events of a kind in the order of the file, of one name or process if given."""
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == phase and name in ("", event["name"]) and pid in (0, event["pid"])
    ]


def lanes(trace: dict[str, Any], category: str) -> list[list[Event]]:
    """The b and e events of a category, by id."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "be" and event["cat"] == category:
            found[event["id"]].append(event)
    return list(found.values())


def _tracks(timed: Iterable[Event]) -> None:
    """Times never run backwards on a track."""
    last: dict[TrackId, float] = {}
    for event in timed:
        track = event["pid"], event["tid"]
        assert event["ts"] >= last.get(track, 0.0), event
        last[track] = event["ts"]


def _named(events: Iterable[Event]) -> None:
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        if event["ph"] != "M":
            assert event["pid"] in processes, event
            assert (event["pid"], event["tid"]) in threads, event


def _spans(timed: Iterable[Event]) -> dict[TrackId, list[Event]]:
    """X events by track; those of one must not overlap."""
    tracks: dict[TrackId, list[Event]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            before = tracks[event["pid"], event["tid"]][-1:]
            assert all(event["ts"] >= each["ts"] + each["dur"] - EXACT_US for each in before), (before, event)
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def _pairs(timed: Iterable[Event]) -> None:
    """Every b has its e, well nested."""
    stacks: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in timed:
        key = event.get("cat"), event.get("id")
        if event["ph"] == "b":
            stacks[key].append(event["name"])
        elif event["ph"] == "e":
            assert stacks[key], f"e without b: {event}"
            assert stacks[key].pop() == event["name"], event
    assert not any(stacks.values()), stacks


def _arrows(timed: Iterable[Event], spans: dict[TrackId, list[Event]]) -> None:
    """Every arrow has two ends, each within a span; the far one begins there."""
    ends: dict[tuple[str, int], dict[str, Event]] = defaultdict(dict)
    for event in timed:
        if event["ph"] in "sf":
            key = event["cat"], event["id"]
            assert event["ph"] not in ends[key], event
            ends[key][event["ph"]] = event
    for each in ends.values():
        assert set(each) == {"s", "f"}, each
        assert each["f"]["bp"] == "e"
        for event in each.values():
            track = spans[event["pid"], event["tid"]]
            at = event["ts"]
            assert any(span["ts"] <= at <= span["ts"] + span["dur"] for span in track), event
