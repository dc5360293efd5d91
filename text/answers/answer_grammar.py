"""Constraints that apply to an answer after its reasoning. Pure."""

import json
import re
from collections.abc import Callable

from headrace.core.types.requests.constraint import Constraint
from headrace.text.answers.reasoning import (
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_MARKS,
    HARMONY_MESSAGE,
    HARMONY_START,
    Opening,
    ReasoningForm,
)

AddedId = Callable[[str], int | None]
_HARMONY_MARK = re.compile("(" + "|".join(map(re.escape, HARMONY_MARKS)) + ")")
_FINAL = f"{HARMONY_CHANNEL}final{HARMONY_MESSAGE}"
_GAP = r"gap: /[ \t\r\n]{0,8}/"  # white space between reasoning and answer


def after_reasoning(
    constraint: Constraint, form: ReasoningForm, opening: Opening, added_id: AddedId, *, framed: bool
) -> Constraint | None:
    """What a text has to match whose answer has to match `constraint`, with any reasoning before it that the form
    allows. added_id: the id of a token that was added to the vocabulary; grammars take these by their ids alone.
    framed: the constraint has what comes before an answer in this form, as those of calls do. None for a grammar that
    cannot be part of another one (GBNF)."""
    answer = _part(constraint)
    if opening == "closed":
        return constraint
    if answer is None:
        return None
    if form.format == "harmony":
        frame = "" if framed else _symbols(_FINAL, added_id)
        again = _symbols(f"{HARMONY_START}assistant", added_id)
        rules = [
            f"start: thoughts? {frame} answer" if opening == "unsaid" else f"start: rest {frame} answer",
            f"thoughts: {_symbols(form.start, added_id)} rest",
            f"rest: until_end {again}",
        ]
    else:
        rules = [
            "start: thoughts? answer" if opening == "unsaid" else "start: rest answer",
            f"thoughts: gap {_symbols(form.start, added_id)} rest",
            "rest: until_end gap",
            _GAP,
        ]
    rules += [_until(HARMONY_END if form.format == "harmony" else form.end, added_id), f"answer: {answer}"]
    return Constraint("grammar", "\n".join(rules))


def _until(mark: str, added_id: AddedId) -> str:
    """The rule of a text up to a mark, and the mark."""
    token = added_id(mark)
    if token is not None:
        return f"until_end: FREE <[{token}]>\nFREE: /(.|\\n)*/"
    return f"until_end[lazy]: /(.|\\n)*{_slashed(re.escape(mark))}/"


def _symbols(text: str, added_id: AddedId) -> str:
    """Symbols of a fixed text with marks in it."""
    token = added_id(text)
    pieces = [text] if token is not None else [piece for piece in _HARMONY_MARK.split(text) if piece]
    ids = [added_id(piece) for piece in pieces]
    return " ".join(json.dumps(p) if i is None else f"<[{i}]>" for p, i in zip(pieces, ids, strict=True))


def _part(constraint: Constraint) -> str | None:
    """The constraint as a part of a rule in Lark."""
    text = constraint.text
    match constraint.kind:
        case "json":
            return f"%json {text}"
        case "regex":
            return f"/{_slashed(text)}/"
        case "choice":
            return " | ".join(map(json.dumps, json.loads(text)))
        case "grammar":
            return None if "::=" in text else f"%lark {{\n{text}\n}}"


def _slashed(expression: str) -> str:
    """A regular expression between slashes, on one line."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", r"\n")
