"""How a model family writes tool calls, told by its chat template, and grammars that force calls in that form. Pure."""

import re
import secrets
import string
from collections.abc import Mapping

import msgspec

from headrace.core.config.server import ToolFormat, ToolParser
from headrace.text.tool_calls.lark import ANY_TEXT, AddedId, opening, symbols
from headrace.text.tool_calls.marks import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    FUNCTION,
    FUNCTION_END,
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_QUOTE,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_FINAL,
    HARMONY_MESSAGE,
    HERMES_BEGIN,
    HERMES_END,
    KEY,
    KEY_END,
    KIMI_ARGUMENTS,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_END,
    MISTRAL_ARGS,
    MISTRAL_BEGIN,
    PARAMETER,
    PARAMETER_END,
    PYTHON_TAG,
    VALUE,
    VALUE_END,
)
from headrace.text.tool_calls.member_grammar import EMPTY, MemberForm, member_rules

MAX_FORCED_CALLS = 16  # in one text; models may repeat themselves without end
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
    numbered: bool = False
    """Colon and number follow the name."""
    single: bool = False
    """A text ends with its first call."""
    answer: str = ""
    """What comes before an answer that is no call."""
    members: MemberForm | None = None
    """How arguments are written that are no JSON."""


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
_KIMI_K2 = CallForm(
    "kimi_k2",
    first=KIMI_BEGIN,
    before=f"{KIMI_CALL}functions.",
    middle=KIMI_ARGUMENTS,
    after=KIMI_CALL_END,
    between="",
    last=KIMI_END,
    numbered=True,
)
_QWEN3_CODER = CallForm(
    "qwen3_coder",
    before=f"{HERMES_BEGIN}\n{FUNCTION}",
    middle=">\n",
    after=f"{FUNCTION_END}\n{HERMES_END}",
    between="\n",
    members=MemberForm(before=PARAMETER, middle=">\n", after=f"\n{PARAMETER_END}\n"),
)
_GLM45 = CallForm(
    "glm45",
    before=HERMES_BEGIN,
    middle="\n",
    after=HERMES_END,
    between="\n",
    members=MemberForm(before=KEY, middle=f"{KEY_END}\n{VALUE}", after=f"{VALUE_END}\n"),
)
_GLM47 = CallForm(
    "glm45",
    before=HERMES_BEGIN,
    middle="",
    after=HERMES_END,
    between="",
    members=MemberForm(before=KEY, middle=f"{KEY_END}{VALUE}", after=VALUE_END),
)
_GEMMA4 = CallForm(
    "gemma4",
    before=f"{GEMMA_BEGIN}call:",
    middle="{",
    after=f"}}{GEMMA_END}",
    between="",
    members=MemberForm(before="", middle=":", after="", between=",", quote=GEMMA_QUOTE),
)
_HARMONY = CallForm(
    "harmony",
    before=f"{HARMONY_CHANNEL}commentary to=functions.",
    middle=f" {HARMONY_CONSTRAIN}json{HARMONY_MESSAGE}",
    after="",  # a token that ends the answer
    between="",
    single=True,
    answer=HARMONY_FINAL,
)
# What tells a form in a template; the first of these that is there.
_TOLD: Mapping[str, ToolFormat] = {
    FUNCTION: "qwen3_coder",
    KEY: "glm45",
    HERMES_BEGIN: "hermes",
    MISTRAL_BEGIN: "mistral",
    DEEPSEEK_BEGIN: "deepseek_v3",
    KIMI_BEGIN: "kimi_k2",
    GEMMA_BEGIN: "gemma4",
    HARMONY_CHANNEL: "harmony",
    PYTHON_TAG: "llama3_json",
}


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
        case "kimi_k2":
            return _KIMI_K2
        case "qwen3_coder":
            return _QWEN3_CODER
        case "glm45":
            return _GLM47 if KEY_END + VALUE in template else _GLM45
        case "gemma4":
            return _GEMMA4
        case "harmony":
            return _HARMONY
        case None:
            return None


def _told_by(template: str) -> ToolFormat | None:
    for mark, form in _TOLD.items():
        if mark in template:
            return form
    if "<|start_header_id|>" in template and '"parameters"' in template:
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
    added_id: AddedId,
    *,
    most: int,
    answer: str | None = None,
    within_text: bool = False,
) -> str:
    """A grammar in Lark of texts that are 1 to `most` calls.

    functions: a JSON schema of the arguments for each name. answer: a JSON schema that the text may match instead.
    within_text: there may be any text before the calls, and it may have none; opening_mark() has to be a token. Raises
    ValueError for a schema that cannot be kept to in this form, with the reason and the name of the function.
    """
    names = [f"f{number}" for number in range(len(functions))]
    again = f" (between call){{0,{most - 1}}}" if most > 1 and not form.single else ""
    rules = [
        f"calls: {symbols(form.first, added_id)} call{again} {symbols(form.last, added_id)}",
        f"between: {symbols(form.between, added_id) or EMPTY}",
        f"call: {'|'.join(names)}",
    ]
    if within_text and form.answer:
        rules += [f"start: {symbols(form.answer, added_id)} FREE | calls", f"FREE: {ANY_TEXT}"]
    elif within_text:
        mark = re.escape(opening_mark(form))
        rules += ["start: FREE | FREE calls", rf"FREE: /(.|\n)*/ & ~/(.|\n)*{mark}(.|\n)*/"]
    elif answer is not None:
        rules += ["start: calls | answer", f"answer: {symbols(form.answer, added_id)} %json {answer}"]
    else:
        rules.append("start: calls")
    for rule_name, (name, schema) in zip(names, functions.items(), strict=True):
        arguments = f"%json {schema}"
        if form.members is not None:
            try:
                rules += member_rules(form.members, f"{rule_name}_arguments", schema, added_id)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            arguments = f"{rule_name}_arguments"
        number = '":" /[0-9]{1,2}/ ' if form.numbered else ""
        head = f"{symbols(form.before + name, added_id)} {number}{symbols(form.middle, added_id)}"
        rules.append(f"{rule_name}: {head} {arguments} {symbols(form.after, added_id)}")
    return "\n".join(rules)


def opening_mark(form: CallForm) -> str:
    """The mark that tells calls from other text; "" for a form without one."""
    return opening(form.first + form.before)
