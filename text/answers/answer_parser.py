"""Tells reasoning, content and tool calls of a generated text apart, as it comes. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

from headrace.text.answers.harmony import read_harmony
from headrace.text.answers.reasoning import Opening, ReasoningForm, Thoughts, read_reasoning
from headrace.text.tool_calls.call_form import CallForm, opening_mark
from headrace.text.tool_calls.call_parser import READERS
from headrace.text.tool_calls.char_reader import CharReader, Found, Functions, Parsing


class AnswerParser:
    """One text. calls, functions: how it may call which functions; None: it calls none. reasoning: how it marks its
    reasoning; None: that is content, if there is any. parallel: False drops all calls but the first.

    Where the text is split into pieces does not matter, and no text is an error.
    """

    def __init__(
        self,
        calls: CallForm | None,
        functions: Functions,
        reasoning: ReasoningForm | None = None,
        opening: Opening = "unsaid",
        *,
        parallel: bool = True,
    ) -> None:
        self._reader = CharReader()
        self._thoughts = Thoughts(self._reader)
        self._parallel = parallel
        self._parsing = self._read(calls, functions, reasoning, opening)
        next(self._parsing)

    def push(self, text: str) -> Found:
        """What is certain now."""
        self._send(text)
        return self._found()

    def whole(self, text: str) -> Found:
        """Everything in a whole text, in the place of push() and flush()."""
        self._send(text)
        return self.flush()

    def flush(self) -> Found:
        """What is new when the text has ended. Nothing must be pushed after that."""
        self._parsing.send("")
        return self._found()

    def reasoning_tokens(self, offsets: Sequence[int]) -> int:
        """How many tokens are reasoning, after flush(). offsets: characters before each of them."""
        return sum(bisect_left(offsets, end) - bisect_left(offsets, start) for start, end in self._thoughts.spans)

    def _send(self, text: str) -> None:
        for char in text:
            self._reader.position += 1
            self._parsing.send(char)

    def _found(self) -> Found:
        found = self._reader.take()
        if self._parallel:
            return found
        return found._replace(calls=[part for part in found.calls if part.call == 0])

    def _read(
        self, calls: CallForm | None, functions: Functions, reasoning: ReasoningForm | None, opening: Opening
    ) -> Parsing[None]:
        reader = self._reader
        reader.char = yield
        if any(form is not None and form.format == "harmony" for form in (calls, reasoning)):
            thoughts = self._thoughts if reasoning is not None else None
            yield from read_harmony(reader, thoughts, functions, opening)
        elif reasoning is not None:
            mark = opening_mark(calls) if calls is not None else ""
            yield from read_reasoning(reader, self._thoughts, reasoning, opening, (mark,) if mark else ())
        if calls is not None and calls.format != "harmony":
            yield from READERS[calls.format](reader, functions)
        while reader.char:
            yield from reader.pass_on()
        while True:
            yield
