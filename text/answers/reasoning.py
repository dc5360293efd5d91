"""How model families mark their reasoning, told by the chat template and the vocabulary; reads it. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from headrace.core.config.server import ReasoningFormat, ReasoningParser
from headrace.text.tool_calls.char_reader import SPACE, CharReader, NotACall, Parsing
from headrace.text.tool_calls.marks import HARMONY_CHANNEL, HARMONY_END, HARMONY_MARKS, HARMONY_MESSAGE

Opening = Literal["open", "closed", "unsaid"]
"""Where an answer begins: within its reasoning, after it, or where the model decides whether to reason."""


class ReasoningForm(msgspec.Struct, frozen=True):
    """The text of an answer's reasoning: start, label, the reasoning, end."""

    format: ReasoningFormat
    start: str
    end: str
    label: str = ""
    """What follows the start and is no reasoning, if it is there."""
    others: tuple[str, ...] = ()
    """Further marks in answers of this form."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that are tokens of models of this form."""
        return self.others or (self.start, self.end)


FORMS: Mapping[ReasoningFormat, ReasoningForm] = {
    form.format: form
    for form in (
        ReasoningForm(
            "harmony",
            start=f"{HARMONY_CHANNEL}analysis{HARMONY_MESSAGE}",
            end=HARMONY_END,
            others=HARMONY_MARKS,
        ),
        ReasoningForm("gemma4", start="<|channel>", end="<channel|>", label="thought\n"),
        ReasoningForm("think", start="<think>", end="</think>"),
        ReasoningForm("kimi", start="◁think▷", end="◁/think▷"),
        ReasoningForm("mistral", start="[THINK]", end="[/THINK]"),
        ReasoningForm("seed_oss", start="<seed:think>", end="</seed:think>"),
    )
}


def reasoning_form(
    parser: ReasoningParser, template: str, added_id: Callable[[str], int | None]
) -> ReasoningForm | None:
    """The form of a model with this chat template. parser: the setting. added_id: the id of a token that was added to
    the vocabulary. None for a model that is not known to reason."""
    if parser == "none":
        return None
    if parser != "auto":
        return FORMS[parser]
    for form in FORMS.values():
        if (form.start if form.others else form.end) in template:
            return form
    for form in FORMS.values():
        if all(added_id(mark) is not None for mark in form.marks):
            return form
    return None


def opening_of(form: ReasoningForm, prompt_end: str, continued: str | None = None) -> Opening:
    """Where the answer begins. prompt_end: of the prompt's text, special tokens included. continued: the text of the
    last message, where the answer continues that."""
    if continued is not None:
        _, opened, after = continued.rpartition(form.start)
        return "open" if opened and form.end not in after and not form.others else "closed"
    text = prompt_end.rstrip(SPACE)
    if text.endswith(form.end) and not form.others:
        return "closed"
    return "open" if text.endswith((form.start, form.start + form.label.rstrip(SPACE))) else "unsaid"


class Thoughts:
    """Reasoning as it is read, without the white space around it, and where in the text it is."""

    def __init__(self, reader: CharReader) -> None:
        self._reader = reader
        self._space = ""
        self._start = 0
        self._silent = True
        self.spans: list[tuple[int, int]] = []
        """Positions in characters, from the first one to the one after the last."""

    def begin(self) -> None:
        """Reasoning begins at the reader's character."""
        reader = self._reader
        self._start = reader.position - bool(reader.char)
        self._space = "\n" if self.spans else ""  # between two parts of it
        self._silent = True

    def add(self, text: str) -> None:
        """More of it."""
        for char in text:
            if char in SPACE:
                self._space += char if not self._silent else ""
            else:
                self._reader.think(self._space + char)
                self._space, self._silent = "", False

    def end(self, mark: str) -> None:
        """It has ended, before this mark, which has been read."""
        reader = self._reader
        self.spans.append((self._start, reader.position - bool(reader.char) - len(mark)))

    @property
    def silent(self) -> bool:
        """Whether there was nothing but white space since it began."""
        return self._silent


def read_reasoning(
    reader: CharReader, thoughts: Thoughts, form: ReasoningForm, opening: Opening, interrupts: Sequence[str]
) -> Parsing[None]:
    """Read the reasoning that a text begins with, if it does, up to what follows it. interrupts: marks that end it as
    its end does, and are left to be found."""
    if opening != "open":
        try:
            yield from reader.space()
            mark = yield from reader.expect(form.start, *interrupts)
        except NotACall:
            reader.give_back()
            return
        held = reader.taken_back()
        if mark != form.start:
            reader.write(held.removesuffix(mark))
            reader.mark = mark
            return
    label = yield from _label(reader, form.label)
    thoughts.begin()
    thoughts.add(label)
    while True:
        mark = yield from reader.until_any((form.start, form.end, *interrupts), thoughts.add)
        if mark != form.start:
            break
        if thoughts.silent:  # models repeat what the prompt ends with
            thoughts.begin()
        else:
            thoughts.add(mark)
    thoughts.end(mark)
    if mark in interrupts:
        reader.mark = mark
    elif mark:
        yield from reader.skip_space()


def _label(reader: CharReader, label: str) -> Parsing[str]:
    """Read the label, if it is there; returns what has been read in its place."""
    try:
        if label:
            yield from reader.expect(label)
        reader.closed()
    except NotACall:
        return reader.taken_back()
    return ""
