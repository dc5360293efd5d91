"""Reads answers in OpenAI's harmony form, which gpt-oss writes: messages, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
"""

import re

from headrace.text.answers.reasoning import Opening, Thoughts
from headrace.text.tool_calls.char_reader import CharReader, Functions, NotACall, Parsing
from headrace.text.tool_calls.marks import (
    HARMONY_CALL,
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_MESSAGE,
    HARMONY_RETURN,
    HARMONY_START,
)

MAX_HEADER = 256  # characters before the text of a message
_CHANNEL = re.compile(re.escape(HARMONY_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\W)to=(?:functions\.)?([^\s<]+)")
_HEADS = (HARMONY_START, HARMONY_CHANNEL)
_ENDS = (HARMONY_END, HARMONY_RETURN, HARMONY_CALL, HARMONY_START)  # the last one where an end is missing


def read_harmony(
    reader: CharReader, thoughts: Thoughts | None, functions: Functions, opening: Opening
) -> Parsing[None]:
    """Read a text up to its end. thoughts: takes the analysis; None: it is content. opening: "closed" for a text that
    begins within a message of the final channel."""
    content = _Content(reader)
    if opening == "closed":
        yield from _content(reader, content)
    while reader.char:
        try:
            header = yield from reader.until(HARMONY_MESSAGE, MAX_HEADER)
        except NotACall:
            held = reader.taken_back()
            if reader.char or not held.startswith(_HEADS):  # a header that the text breaks off in is nothing
                content.add(held)
            yield from _content(reader, content)
            continue
        reader.closed()
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            yield from _call(reader, content, recipient[1] if recipient[1] in functions else "")
            continue
        content.next()
        channel = _CHANNEL.search(header)
        if thoughts is None or channel is None or channel[1] != "analysis":
            yield from _content(reader, content)
            continue
        thoughts.begin()
        thoughts.end((yield from reader.until_any(_ENDS, thoughts.add)))


def _call(reader: CharReader, content: "_Content", name: str) -> Parsing[None]:
    """Read the text of a call. name: "" for one of something that is not offered, whose text is content."""
    yield from reader.skip_space()
    if not name or reader.char != "{":
        content.next()
        yield from _content(reader, content)
        return
    reader.begin(name)
    yield from reader.nested(reader.argument)
    reader.end()
    yield from reader.until_any(_ENDS, lambda _text: None)
    reader.closed()


def _content(reader: CharReader, content: "_Content") -> Parsing[None]:
    yield from reader.until_any(_ENDS, content.add)


class _Content:
    """Content of messages, one of them a line at least."""

    def __init__(self, reader: CharReader) -> None:
        self._reader = reader
        self._some = False
        self._between = ""

    def next(self) -> None:
        """Another message begins."""
        self._between = "\n" if self._some else ""

    def add(self, text: str) -> None:
        """More of it."""
        if text:
            self._reader.write(self._between + text)
            self._some, self._between = True, ""
