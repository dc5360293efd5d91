"""Reads a text that comes in pieces one character at a time, for parsers that are written as generators. Pure.

A parser is a generator that stops wherever it needs the next character, so where the text is split does not matter:

    def parser(reader):                       reader = CharReader(); state = parser(reader); next(state)
        yield from reader.space()             state.send("x")   one character
        if reader.char == "{": ...            state.send("")    the text has ended

A character that is read is held until it is known what it was: a part of a call, or content after all.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

MAX_HELD = 1 << 16  # characters of what may become a call, before its name and the beginning of its arguments
MAX_NAME = 64  # characters of a function's name
SPACE = " \t\n\r"
T = TypeVar("T")
Parsing = Generator[None, str, T]
Functions = Mapping[str, Mapping[str, Any]]  # JSON schemas of their arguments, by their names


class NotACall(Exception):
    """What has been read since the last call or content is no call."""


class CallPart(NamedTuple):
    """A part of a call, or all of it."""

    call: int
    """Number of the call in the text, from 0."""
    name: str | None
    """The function, in the first part of a call; None in all others."""
    arguments: str
    """Text to append to the arguments, a JSON object when it is complete."""
    id: str = ""
    """In the first part: the id that the model has given it; "" where its family gives none."""


class Found(NamedTuple):
    """What is new in a text."""

    content: str
    calls: list[CallPart]
    """The parts of one call are joined."""
    reasoning: str = ""


class CharReader:
    """The current character of a text, and what was found in it so far."""

    def __init__(self) -> None:
        self.char = ""
        """The character that is to be read next; "" at the end of the text."""
        self.position = 0
        """Characters that have come, that one included."""
        self.mark = ""
        """A mark that has been read, and that content_until() is to find."""
        self._reasoning: list[str] = []
        self._held: list[str] = []
        self._content: list[str] = []
        self._parts: list[tuple[int, str | None, list[str], str]] = []  # call, name, pieces of its arguments, id
        self._calls = 0
        self._open = False  # within a call that has begun
        self._closing = False  # between a call and what closes it

    def take(self) -> Found:
        """What was found since the last time."""
        parts = [CallPart(call, name, "".join(pieces), own) for call, name, pieces, own in self._parts]
        found = Found("".join(self._content), parts, "".join(self._reasoning))
        self._content, self._parts, self._reasoning = [], [], []
        return found

    def think(self, text: str) -> None:
        """This is reasoning."""
        self._reasoning.append(text)

    def write(self, text: str) -> None:
        """This is content."""
        self._content.append(text)

    def begin(self, name: str, own_id: str = "") -> None:
        """What is held is the beginning of a call."""
        self._held.clear()
        self._parts.append((self._calls, name, [], own_id))
        self._calls += 1
        self._open = True

    def append(self, arguments: str) -> None:
        """More of the arguments of the call that has begun."""
        if not self._parts:
            self._parts.append((self._calls - 1, None, [], ""))
        self._parts[-1][2].append(arguments)

    def end(self) -> None:
        """The call that has begun is complete; what closes it may follow."""
        self._held.clear()
        self._open = False
        self._closing = True

    def closed(self) -> None:
        """What was read since the call was all part of it."""
        self._held.clear()
        self._closing = False

    def give_back(self) -> None:
        """What is held is content. The end of a call that the text breaks off in is dropped."""
        if not (self._closing and not self.char):
            self._content += self._held
        self._held.clear()
        self._closing = False

    def taken_back(self) -> str:
        """What is held, which is held no more."""
        held = "".join(self._held)
        self._held.clear()
        return held

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._open

    def advance(self) -> Parsing[None]:
        """Read the character, and hold it. Raises NotACall for too much that is held."""
        if not self._open:  # no way back from there
            if len(self._held) >= MAX_HELD:
                raise NotACall
            self._held.append(self.char)
        self.char = yield

    def pass_on(self) -> Parsing[None]:
        """Read the character as content."""
        self._content.append(self.char)
        self.char = yield

    def argument(self) -> Parsing[None]:
        """Read the character as one of the arguments."""
        self.append(self.char)
        self.char = yield

    def space(self) -> Parsing[None]:
        """Read white space."""
        while self.char and self.char in SPACE:
            yield from self.advance()

    def expect(self, *texts: str) -> Parsing[str]:
        """Read one of these texts, none of which is the beginning of another. Raises NotACall for something else."""
        seen = ""
        while seen not in texts:
            seen += self.char
            if not self.char or not any(text.startswith(seen) for text in texts):
                raise NotACall
            yield from self.advance()
        return seen

    def close_by(self, mark: str) -> Parsing[None]:
        """Read the mark that closes a call, with white space around it. Raises NotACall for something else."""
        yield from self.space()
        yield from self.expect(mark)
        yield from self.space()
        self.closed()

    def until(self, mark: str, most: int) -> Parsing[str]:
        """Read up to a mark, and the mark; returns the text before it. Raises NotACall if it has more than `most`
        characters."""
        seen = ""
        while not seen.endswith(mark):
            if not self.char or len(seen) >= most + len(mark):
                raise NotACall
            seen += self.char
            yield from self.advance()
        return seen[: -len(mark)]

    def until_any(self, marks: Sequence[str], give: Callable[[str], None]) -> Parsing[str]:
        """Read up to one of these marks, and the mark, which is returned; "" if the text ends before. give: takes the
        text before it as it comes. The first character of a mark must not be in it again."""
        seen = ""
        while self.char:
            if any(mark.startswith(seen + self.char) for mark in marks):
                seen += self.char
                self.char = yield
                if seen in marks:
                    return seen
            elif seen:
                give(seen)
                seen = ""
            else:
                give(self.char)
                self.char = yield
        if seen:
            give(seen)
        return ""

    def skip_space(self) -> Parsing[None]:
        """Read white space, and drop it."""
        while self.char and self.char in SPACE:
            self.char = yield

    def content_until(self, mark: str) -> Parsing[bool]:
        """Read content up to a mark, and the mark, which is held; False if the text ends before. The first character
        of a mark must not be in it again."""
        if self.mark:
            self._held += self.mark
            self.mark = ""
            return True
        matched = 0
        while self.char:
            if self.char != mark[matched]:
                self.give_back()
                matched = 0
            if self.char == mark[matched]:
                yield from self.advance()
                matched += 1
                if matched == len(mark):
                    return True
            else:
                yield from self.pass_on()
        self.give_back()
        return False

    def string(self) -> Parsing[str]:
        """Read a JSON string. Raises NotACall for something else."""
        raw: list[str] = []
        if self.char != '"':
            raise NotACall
        escaped = False
        while True:
            raw.append(self.char)
            ends = self.char == '"' and not escaped and len(raw) > 1
            escaped = self.char == "\\" and not escaped
            yield from self.advance()
            if ends:
                break
            if not self.char or len(raw) > MAX_HELD:
                raise NotACall
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise NotACall from None

    def nested(self, read: Callable[[], Parsing[None]]) -> Parsing[None]:
        """Read a JSON object or list up to its last bracket, or the end of the text."""
        depth, inside, escaped = 0, False, False
        while self.char:
            char = self.char
            if inside:
                inside = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif char == '"':
                inside = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            yield from read()
            if depth == 0:
                return

    def value(self) -> Parsing[str]:
        """Read any JSON value; returns its text. Raises NotACall where there is none, or not all of it."""
        before = len(self._held)
        if self.char == '"':
            yield from self.string()
        elif self.char in ("{", "["):
            yield from self.nested(self.advance)
        else:
            while self.char and self.char not in ",}]" + SPACE:
                yield from self.advance()
        if not self.char or (not self._open and len(self._held) == before):
            raise NotACall
        return "".join(self._held[before:])
