"""What happened of late, for GET /status: the last requests, and the last errors and restarts. Bounded in memory."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.core.types.errors import shown

Level = Literal["info", "error"]
MAX_REQUESTS = 50
MAX_EVENTS = 50
TEXT_CHARS = 500

Fields = Mapping[str, str | int | float]


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that has ended."""

    ago_s: float
    fields: Fields
    """As the request log has them."""


class RecentEvent(msgspec.Struct, frozen=True):
    """Something that an operator wants to know. Equal ones are counted together."""

    ago_s: float
    """Since the last time."""
    first_ago_s: float
    """Since the first of these."""
    count: int
    level: Level
    source: str
    """What it is about: stages, peer, prefill, or the route of a request."""
    text: str
    """Of the last time."""


@dataclass(slots=True)
class _Event:
    first: float
    last: float
    count: int
    level: Level
    text: str


class RecentEvents:
    """The last requests with a prompt, and events by source and kind: a flood of one kind does not displace others."""

    def __init__(self) -> None:
        self._requests: deque[tuple[float, Fields]] = deque(maxlen=MAX_REQUESTS)
        self._events: OrderedDict[tuple[str, str], _Event] = OrderedDict()  # the oldest first

    def ended(self, fields: Fields, has_prompt: bool, failed: bool, now: float) -> None:
        """A request has ended. fields: as the request log has them; failed: by an error that was not the client's."""
        if has_prompt:
            self._requests.append((now, fields))
        if failed or not has_prompt:
            route, outcome = str(fields.get("route", "")), str(fields.get("outcome", ""))
            text = f"{outcome}: {fields['error']}" if "error" in fields else f"{outcome} ({fields.get('status', '')})"
            self.note(route, outcome, text, now, level="error")

    def note(self, source: str, kind: str, text: str, now: float, *, level: Level) -> None:
        """Something has happened. kind: what is counted together, within a source."""
        text = shown(text, TEXT_CHARS)
        event = self._events.pop((source, kind), None) or _Event(now, now, 0, level, text)
        event.last, event.count, event.level, event.text = now, event.count + 1, level, text
        self._events[source, kind] = event
        if len(self._events) > MAX_EVENTS:
            self._events.popitem(last=False)

    def requests(self, now: float) -> list[EndedRequest]:
        """The last requests, newest first."""
        return [EndedRequest(now - ended, fields) for ended, fields in reversed(self._requests)]

    def events(self, now: float) -> list[RecentEvent]:
        """The last events, newest first."""
        return [
            RecentEvent(now - event.last, now - event.first, event.count, event.level, source, event.text)
            for (source, _), event in reversed(self._events.items())
        ]


class PartTimes(msgspec.Struct, frozen=True):
    """Seconds of a part of the time to first token."""

    part: str
    mean_s: float
    p50_s: float
    p95_s: float


class FirstTokens(msgspec.Struct, frozen=True):
    """Time to first token of the last requests, and where it went."""

    requests: int
    ttft: PartTimes | None = None
    parts: tuple[PartTimes, ...] = ()
    """In the order in which a request goes through them; "other": what belongs to no part, such as the way between
    processes."""


def first_tokens(requests: Sequence[EndedRequest], parts: Sequence[str]) -> FirstTokens:
    """Percentiles over the requests that have had a first token. parts: fields of the request log, which end in _s."""
    timed = [one.fields for one in requests if "ttft_s" in one.fields and all(part in one.fields for part in parts)]
    if not timed:
        return FirstTokens(0)
    columns = {part.removesuffix("_s"): [float(fields[part]) for fields in timed] for part in parts}
    totals = [float(fields["ttft_s"]) for fields in timed]
    known = [sum(each) for each in zip(*columns.values(), strict=True)]
    columns["other"] = [max(0.0, total - sum_) for total, sum_ in zip(totals, known, strict=True)]
    return FirstTokens(len(timed), _times("ttft", totals), tuple(_times(part, each) for part, each in columns.items()))


def _times(part: str, seconds: Iterable[float]) -> PartTimes:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    middle, high = ordered[round(0.5 * last)], ordered[round(0.95 * last)]
    return PartTimes(part, round(sum(ordered) / len(ordered), 6), middle, high)
