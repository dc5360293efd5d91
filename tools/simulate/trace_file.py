"""Reads traces of requests: Mooncake's JSON lines, and CSV.

JSON lines (any name but *.csv), with hash_ids of blocks of 512 tokens; equal ids are equal tokens:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, …]}

CSV with a header; the columns after input_tokens are optional:

    arrival_s,input_tokens,output_tokens,session,prefix_group,prefix_tokens,tenant
    0.25,6955,52,alice-1,support-bot,1200,acme

session: its prompts are beginnings of one text, as the turns of a conversation are. prefix_group: the first
prefix_tokens of all its prompts are equal, such as a system prompt. tenant: whose request it is, which JSON lines may
say as well. It does not separate prefixes, as names of API keys do not.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ceil_div
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest

BLOCK_TOKENS = 512  # of a hash id in Mooncake's traces
LONGEST_PROMPT = 16_000_000  # tokens; more is a mistake of the file
COARSE_S = 1.0  # timestamps in steps of this and more are spread inside their step
COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "session", "prefix_group", "prefix_tokens", "tenant")
REQUIRED = COLUMNS[:2]

Tokens = Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)]


class _Line(msgspec.Struct):
    """A line of Mooncake's format; other fields are ignored."""

    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds."""
    input_length: Tokens
    hash_ids: list[Annotated[int, Meta(ge=0)]]
    output_length: Annotated[int, Meta(ge=0)] = 0
    tenant: str = ""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first requests of a trace, by arrival, which begins at 0.

    Raises ConfigError for a file that cannot be read, has no request, or has a bad line, which the message names.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            found = _read_csv(path.name, lines) if path.suffix.lower() == ".csv" else _read_mooncake(path.name, lines)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if not found:
        raise ConfigError(f"{path.name} has no requests")
    began = found[0].arrival_s
    moved = [msgspec.structs.replace(request, arrival_s=request.arrival_s - began) for request in found]
    return moved[:limit]


def _read_mooncake(name: str, lines: Iterable[str]) -> list[TraceRequest]:
    decoder = msgspec.json.Decoder(_Line)
    found = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except NO_MESSAGE as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        expected = ceil_div(line.input_length, BLOCK_TOKENS)
        if len(line.hash_ids) != expected:
            raise ConfigError(
                f"{name}, line {number}: {line.input_length} tokens are {expected} blocks of {BLOCK_TOKENS}, "
                f"found {len(line.hash_ids)} hash_ids"
            )
        found.append(_mooncake_request(line))
    return _spread(sorted(found, key=lambda request: request.arrival_s))


def _mooncake_request(line: _Line) -> TraceRequest:
    last = line.input_length - BLOCK_TOKENS * (len(line.hash_ids) - 1)
    sizes = [BLOCK_TOKENS] * (len(line.hash_ids) - 1) + [last]
    segments = tuple(map(PromptSegment, line.hash_ids, sizes))
    return TraceRequest(line.timestamp / 1000, segments, line.input_length, line.output_length, line.tenant)


def _spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Spread requests of one timestamp evenly until the next one, where timestamps are whole steps of seconds (3 s in
    Mooncake's traces). Longer gaps are gaps in the arrivals: the step is the median gap."""
    times = sorted({request.arrival_s for request in requests})
    step = median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 0.0
    if step < COARSE_S:
        return list(requests)
    following = dict(pairwise(times))
    spread = []
    for at, group in groupby(requests, key=lambda request: request.arrival_s):
        members = list(group)
        width = min(step, following.get(at, math.inf) - at)
        for index, request in enumerate(members):
            spread.append(msgspec.structs.replace(request, arrival_s=at + width * index / len(members)))
    return spread


class _Texts:
    """Numbers for texts by name, so that equal names are equal tokens."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._count = 0

    def named(self, kind: str, name: str) -> int:
        """The text of a session or a prefix group."""
        if (kind, name) not in self._numbers:
            self._numbers[kind, name] = self.unique()
        return self._numbers[kind, name]

    def unique(self) -> int:
        """A text that no other request has."""
        self._count += 1
        return self._count


def _read_csv(name: str, lines: Iterable[str]) -> list[TraceRequest]:
    rows = csv.DictReader(lines, skipinitialspace=True)
    header = rows.fieldnames or ()
    if missing := [column for column in REQUIRED if column not in header]:
        raise ConfigError(f"{name}, line 1: the header has to name {' and '.join(REQUIRED)}; {missing[0]} is missing")
    if unknown := [column for column in header if column not in COLUMNS]:
        raise ConfigError(f"{name}, line 1: there is no column {unknown[0]!r}; there are {', '.join(COLUMNS)}")
    return sorted(_csv_requests(name, rows), key=lambda request: request.arrival_s)


def _csv_requests(name: str, rows: "csv.DictReader[str]") -> Iterator[TraceRequest]:
    texts = _Texts()
    try:
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if None in row:
                raise ConfigError(f"{where}: it has more values than the header has columns")
            yield _csv_request(where, {key: (value or "").strip() for key, value in row.items()}, texts)
    except csv.Error as error:
        raise ConfigError(f"{name}, line {rows.line_num}: {error}") from None


def _csv_request(where: str, row: dict[str, str], texts: _Texts) -> TraceRequest:
    tokens = _whole(where, "input_tokens", row["input_tokens"], 1)
    shared = _whole(where, "prefix_tokens", row.get("prefix_tokens") or "0", 0)
    group, session = row.get("prefix_group", ""), row.get("session", "")
    if bool(group) != bool(shared):
        given, other = ("prefix_group", "prefix_tokens") if group else ("prefix_tokens", "prefix_group")
        raise ConfigError(f"{where}: {given} needs {other} beside it")
    segments = [PromptSegment(texts.named("group", group), min(shared, tokens))] if group else []
    if tokens > shared:
        own = texts.named("session", session) if session else texts.unique()
        segments.append(PromptSegment(own, tokens - shared))
    output = _whole(where, "output_tokens", row.get("output_tokens") or "0", 0)
    return TraceRequest(_seconds(where, row["arrival_s"]), tuple(segments), tokens, output, row.get("tenant", ""))


def _whole(where: str, column: str, text: str, low: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not low <= value <= LONGEST_PROMPT:
        raise ConfigError(
            f"{where}: {column} has to be a whole number from {low} to {LONGEST_PROMPT}, found {text!r}"
        )  # fmt: skip
    return value


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{where}: arrival_s has to be a number of seconds, at least 0, found {text!r}")
    return value
