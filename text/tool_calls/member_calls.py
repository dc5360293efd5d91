"""Reads calls whose arguments are written member by member, not as JSON, which is made of them as they come. Pure.

Qwen3-Coder and GLM write a text for each argument, which the function's schema says how to take: it is a string unless
it is JSON of a type that the schema allows. Gemma writes JSON with bare keys and quotes of its own.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from headrace.text.tool_calls.char_reader import MAX_NAME, SPACE, CharReader, Functions, NotACall, Parsing
from headrace.text.tool_calls.marks import (
    FUNCTION,
    FUNCTION_END,
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_QUOTE,
    HERMES_BEGIN,
    HERMES_END,
    KEY,
    KEY_END,
    PARAMETER,
    PARAMETER_END,
    VALUE,
    VALUE_END,
)

_TYPES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_ANY = frozenset(_TYPES.values())
_PYTHON = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
NextKey = Callable[[CharReader], Parsing[str | None]]


class _Cut(Exception):
    """The text has ended within the arguments of a call, which are passed on in part."""


def qwen3_coder(reader: CharReader, functions: Functions) -> Parsing[None]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call> for each call, with line breaks
    around all of these."""
    while (yield from reader.content_until(HERMES_BEGIN)):
        try:
            yield from reader.space()
            yield from reader.expect(FUNCTION)
            name = yield from reader.until(">", MAX_NAME)
            yield from _members(reader, name, functions, _parameter, PARAMETER_END, framed=True)
            yield from reader.close_by(HERMES_END)
        except NotACall:
            reader.give_back()
        except _Cut:
            return


def glm45(reader: CharReader, functions: Functions) -> Parsing[None]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call> for each call, or with line breaks
    before the marks."""
    while (yield from reader.content_until(HERMES_BEGIN)):
        try:
            name = yield from _name(reader, "<\n")
            yield from _members(reader, name, functions, _key, VALUE_END, framed=False)
            yield from reader.space()
            reader.closed()
        except NotACall:
            reader.give_back()
        except _Cut:
            return


def gemma4(reader: CharReader, functions: Functions) -> Parsing[None]:
    """<|tool_call>call:name{key:<|"|>value<|"|>,other:[1,{inner:true}]}<tool_call|> for each call."""
    while (yield from reader.content_until(GEMMA_BEGIN)):
        try:
            yield from reader.space()
            yield from reader.expect("call:")
            name = yield from _name(reader, "{")
            if name not in functions:
                raise NotACall
            reader.begin(name)
            yield from _gemma_object(reader)
            reader.end()
            yield from reader.close_by(GEMMA_END)
        except NotACall:
            reader.give_back()
        except _Cut:
            return


def _name(reader: CharReader, ends: str) -> Parsing[str]:
    """Read a name up to one of these characters."""
    yield from reader.space()
    name = ""
    while reader.char not in ends or not reader.char:
        if not reader.char or len(name) > MAX_NAME:
            raise NotACall
        name += reader.char
        yield from reader.advance()
    return name.strip(SPACE)


def _members(
    reader: CharReader, name: str, functions: Functions, next_key: NextKey, mark: str, *, framed: bool
) -> Parsing[None]:
    """Read the arguments of a call whose name has been read. next_key: reads up to the next value; returns its key, or
    None behind the last one. mark: ends a value. framed: a line break at the beginning of a value and one at its end
    are no part of it."""
    if name not in functions:
        raise NotACall
    reader.begin(name)
    properties = functions[name].get("properties")
    some = False
    while (key := (yield from next_key(reader))) is not None:
        reader.append(f"{', ' if some else '{'}{_string(key)}: ")
        some = True
        types = types_of(properties.get(key) if isinstance(properties, Mapping) else None)
        pieces: list[str] = []
        if types == {"string"}:  # as it comes
            reader.append('"')
            yield from _value_text(reader, mark, lambda text: reader.append(_string(text)[1:-1]), framed=framed)
            reader.append('"')
        else:
            yield from _value_text(reader, mark, pieces.append, framed=framed)
            reader.append(_json("".join(pieces), types))
    reader.append("}" if some else "{}")
    reader.end()


def _parameter(reader: CharReader) -> Parsing[str | None]:
    if (yield from _up_to(reader, PARAMETER, FUNCTION_END, HERMES_END)) != PARAMETER:
        return None
    return (yield from _text_up_to(reader, ">"))


def _key(reader: CharReader) -> Parsing[str | None]:
    if (yield from _up_to(reader, KEY, HERMES_END)) != KEY:
        return None
    key = yield from _text_up_to(reader, KEY_END)
    yield from _up_to(reader, VALUE)
    return key.strip(SPACE)


def _up_to(reader: CharReader, *marks: str, give: Callable[[str], None] = lambda _text: None) -> Parsing[str]:
    """Read up to one of these marks, and the mark, which is returned."""
    mark = yield from reader.until_any(marks, give)
    if not mark:
        raise _Cut
    return mark


def _text_up_to(reader: CharReader, mark: str) -> Parsing[str]:
    pieces: list[str] = []
    yield from _up_to(reader, mark, give=pieces.append)
    return "".join(pieces)


def _value_text(reader: CharReader, mark: str, give: Callable[[str], None], *, framed: bool) -> Parsing[None]:
    held = ""

    def add(text: str) -> None:
        nonlocal held
        if held:
            give(held)
        held = text if framed and text == "\n" else ""
        if not held:
            give(text)

    if framed and reader.char == "\n":
        reader.char = yield
    yield from _up_to(reader, mark, give=add)


def _gemma_object(reader: CharReader) -> Parsing[None]:
    """Read an object from its first bracket to its last, and pass it on as JSON."""
    open_brackets: list[str] = []
    before_key = False
    while True:
        char = reader.char
        if not char:
            raise _Cut
        if char in SPACE:
            reader.char = yield
        elif char in "{}[],:":
            yield from reader.argument()
            if char in "{[":
                open_brackets.append(char)
            elif char in "}]":
                open_brackets.pop()
                if not open_brackets:
                    return
            before_key = char in "{," and open_brackets[-1] == "{"
        elif before_key and char != GEMMA_QUOTE[0]:
            reader.append(_string((yield from _text_up_to(reader, ":")).strip(SPACE)) + ":")
            before_key = False
        else:
            yield from _gemma_value(reader)


def _gemma_value(reader: CharReader) -> Parsing[None]:
    """Read a string between quotes, or anything else up to what ends it."""
    word = ""
    while reader.char and GEMMA_QUOTE.startswith(word + reader.char):
        word += reader.char
        reader.char = yield
        if word == GEMMA_QUOTE:
            reader.append('"')
            yield from _up_to(reader, GEMMA_QUOTE, give=lambda text: reader.append(_string(text)[1:-1]))
            reader.append('"')
            return
    while reader.char and reader.char not in ",]}":
        word += reader.char
        reader.char = yield
    if not reader.char:
        raise _Cut
    word = word.strip(SPACE)
    reader.append(word if _is_string(word) else _json(word, _ANY - {"string"}))


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows by what it says itself; all of them where it says nothing."""
    if not isinstance(schema, Mapping):
        return _ANY
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_TYPES[type(value)] for value in values)
    given = schema.get("type")
    if given is not None:
        return frozenset(each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str))
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list):
            return frozenset[str]().union(*map(types_of, several))
    return _ANY


def _json(text: str, types: Collection[str]) -> str:
    """The value that a text of an argument stands for, as JSON."""
    bare = text.strip(SPACE)
    value = _decoded(bare)
    kind = _TYPES[type(value)]
    if kind != "string" and (kind in types or (kind in ("integer", "number") and {"integer", "number"} & set(types))):
        return bare
    if "string" not in types and _PYTHON.get(bare.lower()) in types:
        return bare.lower() if bare.lower() != "none" else "null"
    return _string(text)


def _decoded(text: str) -> Any:
    """A text as JSON; itself if it is none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _is_string(text: str) -> bool:
    return text.startswith('"') and isinstance(_decoded(text), str) and _decoded(text) != text


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
