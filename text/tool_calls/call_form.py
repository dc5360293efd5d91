"""How a model family writes tool calls, told by its chat template, and grammars that force calls in that form. Pure."""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headrace.core.config.server import ToolFormat, ToolParser
from headrace.text.tool_calls.call_parser import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    HERMES_BEGIN,
    HERMES_END,
    MISTRAL_ARGS,
    MISTRAL_BEGIN,
    MISTRAL_ID,
    PYTHON_TAG,
)

MAX_FORCED_CALLS = 16  # in one text; models may repeat themselves without end
MARKS = (
    HERMES_BEGIN,
    HERMES_END,
    PYTHON_TAG,
    MISTRAL_BEGIN,
    MISTRAL_ARGS,
    MISTRAL_ID,
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_SEPARATOR,
)
# Of other families, which write hermes' marks around XML.
_XML = ("<function=", "<arg_key>")
_MARK = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")
_ARGUMENTS_AS_JSON = re.compile(r"arguments['\"]?\]?\s*\|\s*tojson")


class CallForm(msgspec.Struct, frozen=True):
    """The text of calls: first, calls joined by between, last; each is before, name, middle, arguments, after."""

    format: ToolFormat
    before: str
    middle: str
    after: str
    between: str
    first: str = ""
    last: str = ""
    short_ids: bool = False
    """Ids of calls have nine letters and digits, or the chat template refuses them."""
    text_arguments: bool = False
    """The chat template takes the arguments of a call as text, not as an object."""


_HERMES = CallForm(
    "hermes",
    before=f'{HERMES_BEGIN}\n{{"name": "',
    middle='", "arguments": ',
    after=f"}}\n{HERMES_END}",
    between="\n",
)
_LLAMA3 = CallForm("llama3_json", before='{"name": "', middle='", "parameters": ', after="}", between="; ")
_MISTRAL_LIST = CallForm(
    "mistral",
    first=f"{MISTRAL_BEGIN}[",
    before='{"name": "',
    middle='", "arguments": ',
    after="}",
    between=", ",
    last="]",
    short_ids=True,
)
_MISTRAL = CallForm("mistral", before=MISTRAL_BEGIN, middle=MISTRAL_ARGS, after="", between="", short_ids=True)
_DEEPSEEK_V3 = CallForm(
    "deepseek_v3",
    first=DEEPSEEK_BEGIN,
    before=f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}",
    middle="\n```json\n",
    after=f"\n```{DEEPSEEK_CALL_END}",
    between="\n",
    last=DEEPSEEK_END,
)
_DEEPSEEK_V31 = CallForm(
    "deepseek_v3",
    first=DEEPSEEK_BEGIN,
    before=DEEPSEEK_CALL,
    middle=DEEPSEEK_SEPARATOR,
    after=DEEPSEEK_CALL_END,
    between="",
    last=DEEPSEEK_END,
)


def call_form(parser: ToolParser, template: str) -> CallForm | None:
    """The form of a model with this chat template. parser: the setting. None if the template does not tell."""
    form = _told_by(template) if parser == "auto" else parser
    match form:
        case "hermes":
            return _HERMES
        case "llama3_json":
            return _LLAMA3
        case "mistral":
            return _MISTRAL if MISTRAL_ARGS in template else _MISTRAL_LIST
        case "deepseek_v3":
            own = _DEEPSEEK_V31 if DEEPSEEK_SEPARATOR in template and "```json" not in template else _DEEPSEEK_V3
            as_text = _ARGUMENTS_AS_JSON.search(template) is None
            return msgspec.structs.replace(own, text_arguments=as_text)
        case None:
            return None


def _told_by(template: str) -> ToolFormat | None:
    if HERMES_BEGIN in template and not any(mark in template for mark in _XML):
        return "hermes"
    if MISTRAL_BEGIN in template:
        return "mistral"
    if DEEPSEEK_BEGIN in template:
        return "deepseek_v3"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    return None


def new_call_id(form: CallForm) -> str:
    """A random id of a call."""
    if form.short_ids:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def calls_grammar(
    form: CallForm,
    functions: Mapping[str, str],
    added_id: Callable[[str], int | None],
    *,
    most: int,
    answer: str | None = None,
    within_text: bool = False,
) -> str:
    """A grammar in Lark of texts that are 1 to `most` calls.

    functions: a JSON schema of the arguments for each name. added_id: the id of a token that was added to the
    vocabulary; llguidance takes these by their ids alone. answer: a JSON schema that the text may match instead.
    within_text: there may be any text before the calls, and it may have none; opening_mark() has to be a token.
    """

    def text(*parts: str) -> Sequence[str]:
        pieces = [piece for piece in _MARK.split("".join(parts)) if piece]
        ids = [added_id(piece) for piece in pieces]
        return [
            json.dumps(piece) if token is None else f"<[{token}]>" for piece, token in zip(pieces, ids, strict=True)
        ]

    def rule(name: str, parts: Sequence[str]) -> str:
        return f"{name}: {' '.join(parts) or json.dumps('')}"

    names = [f"f{number}" for number in range(len(functions))]
    again = f"(between call){{0,{most - 1}}}" if most > 1 else ""
    rules = [
        rule("calls", [*text(form.first), "call", again, *text(form.last)]),
        rule("between", text(form.between)),
        rule("call", ["|".join(names)]),
    ]
    if within_text:
        mark = re.escape(opening_mark(form))
        rules += ["start: FREE | FREE calls", rf"FREE: /(.|\n)*/ & ~/(.|\n)*{mark}(.|\n)*/"]
    elif answer is not None:
        rules += ["start: calls | answer", f"answer: %json {answer}"]
    else:
        rules.append("start: calls")
    for rule_name, (name, schema) in zip(names, functions.items(), strict=True):
        parts = [*text(form.before, name, form.middle), f"%json {schema}", *text(form.after)]
        rules.append(rule(rule_name, parts))
    return "\n".join(rules)


def opening_mark(form: CallForm) -> str:
    """The mark that tells calls from other text; "" for a form without one."""
    found = _MARK.match(form.first + form.before)
    return found[0] if found is not None else ""
