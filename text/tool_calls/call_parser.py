"""Reads the tool calls of a model family in generated text, as it comes. Pure.

Text that turns out to be no call of an offered function is content, unchanged; nothing is lost but what frames calls,
and white space after them. Arguments are passed on as the model writes them, from their first bracket on.
"""

import re
from collections.abc import Callable, Collection, Mapping

from headrace.core.config.server import ToolFormat
from headrace.text.tool_calls.char_reader import MAX_NAME, SPACE, CharReader, Functions, NotACall, Parsing
from headrace.text.tool_calls.marks import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    HERMES_BEGIN,
    HERMES_END,
    KIMI_ARGUMENTS,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_END,
    MISTRAL_ARGS,
    MISTRAL_BEGIN,
    MISTRAL_ID,
    PYTHON_TAG,
)
from headrace.text.tool_calls.member_calls import gemma4, glm45, qwen3_coder

KIMI_PREFIX = "functions."
MAX_ID = len(KIMI_PREFIX) + MAX_NAME + 8  # characters of an id that a model gives to a call
_ARGUMENTS = ("arguments", "parameters")
_KIMI_ID = re.compile(rf"(?:{re.escape(KIMI_PREFIX)})?(\S+):\d+")
CallReader = Callable[[CharReader, Functions], Parsing[None]]  # reads content and calls up to the end of the text


def _hermes(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, again for each call."""
    while (yield from reader.content_until(HERMES_BEGIN)):
        try:
            yield from reader.space()
            yield from _call_object(reader, names)
            yield from reader.close_by(HERMES_END)
        except NotACall:
            reader.give_back()


def _llama3_json(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    """{"name": ..., "parameters": {...}} at the beginning of the text or after a tag; several with semicolons."""
    while True:
        try:
            yield from reader.space()
            if reader.char == PYTHON_TAG[0]:
                yield from reader.expect(PYTHON_TAG)
                yield from reader.space()
            yield from _call_object(reader, names)
            yield from reader.space()
            while reader.char == ";":
                yield from reader.advance()
                yield from reader.space()
                if reader.char:
                    yield from _call_object(reader, names)
                    yield from reader.space()
            reader.closed()
        except NotACall:
            reader.give_back()
        if not (yield from reader.content_until(PYTHON_TAG)):
            return


def _mistral(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    """[TOOL_CALLS] and a JSON list of calls, or, since 2025, [TOOL_CALLS]name[ARGS]{...} for each call."""
    while (yield from reader.content_until(MISTRAL_BEGIN)):
        try:
            yield from reader.space()
            if reader.char == "[":
                yield from _call_list(reader, names)
            else:
                yield from _named_call(reader, names)
            yield from reader.space()
            reader.closed()
        except NotACall:
            reader.give_back()


def _call_list(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    yield from reader.advance()
    while True:
        yield from reader.space()
        yield from _call_object(reader, names)
        yield from reader.space()
        if reader.char != ",":
            break
        yield from reader.advance()
    yield from reader.expect("]")


def _named_call(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    name = yield from _word(reader)
    if reader.char == "[":
        mark = yield from reader.expect(MISTRAL_ARGS, MISTRAL_ID)
        if mark == MISTRAL_ID:
            yield from _word(reader)
            yield from reader.expect(MISTRAL_ARGS)
    yield from reader.space()
    yield from _arguments(reader, name, names)


def _word(reader: CharReader) -> Parsing[str]:
    seen = ""
    while reader.char and reader.char not in SPACE + "[{":
        if len(seen) == MAX_NAME:
            raise NotACall
        seen += reader.char
        yield from reader.advance()
    return seen


def _deepseek_v3(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    """Calls with marks around all and around each: function, separator, name, and the arguments in a block of code; in
    V3.1 the name, separator and the arguments."""
    yield from _marked_calls(
        reader, (DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_END), lambda: _deepseek_call(reader, names)
    )


def _marked_calls(reader: CharReader, marks: tuple[str, str, str], read: Callable[[], Parsing[None]]) -> Parsing[None]:
    """Calls between marks. marks: before all, before each, behind all. read: reads a call behind its mark."""
    begin, each, end = marks
    while (yield from reader.content_until(begin)):
        try:
            yield from reader.space()
            mark = yield from reader.expect(each)
            while mark == each:
                yield from read()
                yield from reader.space()
                mark = yield from reader.expect(each, end)
            yield from reader.space()
            reader.closed()
        except NotACall:
            reader.give_back()


def _deepseek_call(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    name = yield from reader.until(DEEPSEEK_SEPARATOR, MAX_NAME)
    if reader.char != "{":
        name = yield from reader.until("\n", MAX_NAME)
        yield from reader.expect("```json")
        yield from reader.space()
    yield from _arguments(reader, name.strip(), names)
    yield from reader.space()
    if reader.char == "`":
        yield from reader.expect("```")
        yield from reader.space()
    yield from reader.expect(DEEPSEEK_CALL_END)
    reader.end()


def _kimi_k2(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    """Calls with marks around all and around each: functions.name:number, which is its id, a mark, the arguments."""
    yield from _marked_calls(reader, (KIMI_BEGIN, KIMI_CALL, KIMI_END), lambda: _kimi_call(reader, names))


def _kimi_call(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    own_id = (yield from reader.until(KIMI_ARGUMENTS, MAX_ID)).strip(SPACE)
    yield from reader.space()
    named = _KIMI_ID.fullmatch(own_id)
    if named is None:
        raise NotACall
    yield from _arguments(reader, named[1], names, own_id)
    yield from reader.space()
    yield from reader.expect(KIMI_CALL_END)


def _arguments(reader: CharReader, name: str, names: Collection[str], own_id: str = "") -> Parsing[None]:
    """The arguments of a call whose name has been read."""
    if name not in names or reader.char != "{":
        raise NotACall
    reader.begin(name, own_id)
    yield from reader.nested(reader.argument)
    reader.end()


def _call_object(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    """A call that is one JSON object. What follows the arguments in it is left out."""
    try:
        yield from _call_fields(reader, names)
    except NotACall:
        if not reader.is_open:
            raise
    reader.end()


def _call_fields(reader: CharReader, names: Collection[str]) -> Parsing[None]:
    name, early = "", ""
    yield from reader.expect("{")
    yield from reader.space()
    while True:
        field = yield from reader.string()
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if field == "name" and not name:
            name = yield from reader.string()
            if name not in names:
                raise NotACall
        elif field in _ARGUMENTS:
            if reader.char != "{" or early or reader.is_open:
                raise NotACall
            if name:
                reader.begin(name)
                yield from reader.nested(reader.argument)
            else:
                early = yield from reader.value()
        else:
            yield from reader.value()
        if early and name:
            reader.begin(name)
            reader.append(early)
            early = ""
        yield from reader.space()
        if reader.char != ",":
            break
        yield from reader.advance()
        yield from reader.space()
    yield from reader.expect("}")
    if not name:
        raise NotACall
    if not reader.is_open:  # a function without parameters
        reader.begin(name)
        reader.append("{}")


READERS: Mapping[ToolFormat, CallReader] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _kimi_k2,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "gemma4": gemma4,
}
"""Of all formats but harmony, which is that of whole answers."""
