"""What calls, events and effects are called in listings: a line each, with ids of requests in place of serials."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward, Order, ReplicaOrder
from headrace.core.messages.stage_events import StageEvent
from headrace.core.runtime.rate_limit import printable
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import packed_length
from headrace.scheduler.recording.file import Call
from headrace.scheduler.scheduler import Effect

MOST_ROWS = 6
MOST_FIELDS = 8
LONGEST = 60  # characters of a text
LONG_ID, ID_BEGINNING = 20, 13  # characters: "cmpl-" and eight digits of 32

NOTHING = "no effects"

NameOf = Callable[[int], str | None]
"""The id of the request with a serial."""


def called(call: Call, name_of: NameOf) -> str:
    """A call of the scheduler."""
    return call.kind if call.event is None else message(call.event, name_of)


def message(given: msgspec.Struct, name_of: NameOf) -> str:
    """An event or an effect."""
    match given:
        case ReplicaOrder(replica=replica, order=order):
            return f"replica {replica}: {message(order, name_of)}"
        case Forward(seq=seq, rows=rows):
            shown = [
                f"{name(row.request, name_of)} [{row.start:,}, {row.start + row.count:,})" for row in rows[:MOST_ROWS]
            ]
            more = f" and {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
            return f"Forward {seq}: {', '.join(shown) or 'no rows'}{more}"
        case Submit(rid=rid, prompt=prompt, route=route):
            return f"Submit {short(rid)}: {packed_length(prompt):,} tokens, {type(route).__name__}"
    return " ".join([type(given).__name__, *_fields(given, name_of)])


def effects_line(effects: Sequence[Effect], name_of: NameOf, most: int = 4) -> str:
    """The effects of one call."""
    more = f"; {len(effects) - most} more" if len(effects) > most else ""
    return "; ".join(message(effect, name_of) for effect in effects[:most]) + more if effects else NOTHING


def name(serial: int, name_of: NameOf) -> str:
    """A request that stages know by a number."""
    return brief(name_of(serial) or f"#{serial}")


def counted(number: int, what: str) -> str:
    """So many of something."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def brief(rid: str) -> str:
    """The id of a request as it is named beside others: the beginning of a long one, which `why` takes, too."""
    return short(rid if len(rid) <= LONG_ID else rid[:ID_BEGINNING])


def short(text: str) -> str:
    """A text of a recording, as it can be shown on a line."""
    return printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def _fields(given: msgspec.Struct, name_of: NameOf) -> Iterator[str]:
    """Fields that are neither empty nor at their defaults."""
    numbered = isinstance(given, Order | StageEvent)
    shown = 0
    for field in msgspec.structs.fields(given):
        value = getattr(given, field.name)
        empty = value is None or value is False or value in ("", b"", (), {})
        if empty or value == field.default or shown == MOST_FIELDS:
            continue
        shown += 1
        if field.name == "request" and numbered:
            yield f"request {name(value, name_of)}"
        else:
            yield f"{field.name} {_value(value)}"


def _value(value: object) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case str():
            return short(value) or '""'
        case bytes() | bytearray():
            return f"({len(value)} bytes)"
        case tuple() | list() | dict() | set():
            return f"({len(value)})"
        case ErrorInfo(code=code):
            return short(code)
        case msgspec.Struct():
            return type(value).__name__
    return short(str(value))
