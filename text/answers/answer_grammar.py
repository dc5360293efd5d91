"""Constraints that apply to an answer after its reasoning. Pure."""

import json

from headrace.core.types.requests.constraint import Constraint
from headrace.text.answers.reasoning import Opening, ReasoningForm
from headrace.text.tool_calls.lark import AddedId, rules_up_to, slashed, symbols
from headrace.text.tool_calls.marks import HARMONY_END, HARMONY_FINAL, HARMONY_START

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
        frame = "" if framed else symbols(HARMONY_FINAL, added_id)
        again = symbols(f"{HARMONY_START}assistant", added_id)
        rules = [
            f"start: thoughts? {frame} answer" if opening == "unsaid" else f"start: rest {frame} answer",
            f"thoughts: {symbols(form.start, added_id)} rest",
            f"rest: until_end {again}",
        ]
    else:
        rules = [
            "start: thoughts? answer" if opening == "unsaid" else "start: rest answer",
            f"thoughts: gap {symbols(form.start, added_id)} rest",
            "rest: until_end gap",
            _GAP,
        ]
    end = HARMONY_END if form.format == "harmony" else form.end
    rules += [*rules_up_to("until_end", end, added_id), f"answer: {answer}"]
    return Constraint("grammar", "\n".join(rules))


def _part(constraint: Constraint) -> str | None:
    """The constraint as a part of a rule in Lark."""
    text = constraint.text
    match constraint.kind:
        case "json":
            return f"%json {text}"
        case "regex":
            return f"/{slashed(text)}/"
        case "choice":
            return " | ".join(map(json.dumps, json.loads(text)))
        case "grammar":
            return None if "::=" in text else f"%lark {{\n{text}\n}}"
