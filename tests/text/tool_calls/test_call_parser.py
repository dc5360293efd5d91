"""Tool calls in the text of each model family, wherever the text is split."""

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config.server import ToolFormat
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.tool_calls.call_form import CallForm, call_form
from headrace.text.tool_calls.char_reader import MAX_HELD, CallPart, Functions
from headrace.text.tool_calls.marks import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_END,
    MARKS,
)
from headrace.text.tool_calls.member_calls import types_of

PROPERTIES = {"s": {"type": "string"}, "n": {"type": "number"}, "b": {"type": ["boolean", "null"]}, "o": {}}
FUNCTIONS: Functions = {"get_weather": {}, "f": {"properties": PROPERTIES}}
FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
Calls = list[tuple[str, str]]
PARIS = '{"city": "Paris }<", "days": [1, {"a": "\\"]"}]}'


def form_of(name: ToolFormat) -> CallForm:
    form = call_form(name, "")
    assert form is not None
    return form


def read(form: ToolFormat, *pieces: str, parallel: bool = True) -> tuple[str, Calls]:
    """Content and calls of a text in pieces, put together as clients do."""
    parser = AnswerParser(form_of(form), FUNCTIONS, parallel=parallel)
    found = [*map(parser.push, pieces), parser.flush()]
    calls: Calls = []
    for _, parts, _ in found:
        for part in parts:
            if part.name is not None:
                assert part.call == len(calls)
                calls.append((part.name, ""))
            name, arguments = calls[part.call]
            calls[part.call] = (name, arguments + part.arguments)
    return "".join(content for content, _, _ in found), calls


def deepseek(name: str, arguments: str) -> str:
    head = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{name}\n"
    return f"{head}```json\n{arguments}\n```{DEEPSEEK_CALL_END}"


TEXTS: list[tuple[ToolFormat, str, str, Calls]] = [
    # As the families' chat templates write calls.
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "Let me see.\n",
        [("f", "{}"), ("get_weather", PARIS)],
    ),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f", "arguments": {{}}}}]',
        "",
        [("get_weather", PARIS), ("f", "{}")],
    ),
    ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{}', "Yes.", [("f", '{"a": 1}'), ("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "", [("f", "{}")]),
    (
        "deepseek_v3",
        f"One moment.{DEEPSEEK_BEGIN}{deepseek('get_weather', PARIS)}\n{deepseek('f', '{}')}{DEEPSEEK_END}",
        "One moment.",
        [("get_weather", PARIS), ("f", "{}")],
    ),
    (
        "deepseek_v3",
        f'{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}f{DEEPSEEK_SEPARATOR}{{"a": 1}}{DEEPSEEK_CALL_END}{DEEPSEEK_END}',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "kimi_k2",
        "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Yes.",
        [("get_weather", PARIS), ("f", "{}")],
    ),
    (
        "qwen3_coder",
        'I see.\n<tool_call>\n<function=f>\n<parameter=s>\nline "1"\n\n</parameter>\n<parameter=n>\n-1.5\n'
        '</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "I see.\n",
        [("f", '{"s": "line \\"1\\"\\n", "n": -1.5, "b": true, "o": {"a": [1]}}'), ("f", "{}")],
    ),
    (
        "glm45",
        "\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12"
        "</arg_value>\n<arg_key>o</arg_key>\n<arg_value>so</arg_value>\n</tool_call>",
        "\n",
        [("f", '{"s": "12", "n": 12, "o": "so"}')],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>b</arg_key><arg_value>null</arg_value></tool_call><tool_call>get_weather</tool_call>",
        "",
        [("f", '{"b": null}'), ("get_weather", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{s:<|"|>a "b", {c}<|"|>,n:-1.5,o:{in:[<|"|>x<|"|>,true],k:null}}<tool_call|>'
        "<|tool_call>call:f{}<tool_call|>",
        "",
        [("f", '{"s":"a \\"b\\", {c}","n":-1.5,"o":{"in":["x",true],"k":null}}'), ("f", "{}")],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
        f" <|constrain|>json<|message|>{PARIS}<|call|>",
        "I look.",
        [("get_weather", PARIS)],
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|end|><|start|>assistant'
        "<|channel|>final<|message|>Done.",
        "Done.",
        [("f", '{"a": 1}')],
    ),
    # As models deviate from them.
    (
        "gemma4",
        '<|tool_call>call:f{ s: Paris , <|"|>o<|"|>: "a", b: True}<tool_call|>',
        "",
        [
            ("f", '{"s":"Paris","o":"a","b":true}'),
        ],
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>many</parameter></function>", "", [("f", '{"n": "many"}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [1], "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>Done', "Done", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} and so on', " and so on", [("f", '{"a": 1}')]),
    # No calls of what was offered: the text as it is.
    ("hermes", '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "the text", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "the text", []),
    ("hermes", "a < b <tool_calls> <<tool_call>> <tool_call", "the text", []),
    ("llama3_json", '{"city": "Paris"} is {"name": "f", "parameters": {}}', "the text", []),
    ("llama3_json", "plain", "the text", []),
    ("mistral", "[TOOL_CALLS][]", "the text", []),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}", "the text", []),
    ("deepseek_v3", DEEPSEEK_BEGIN + DEEPSEEK_END, "the text", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>call_1<|tool_call_argument_begin|>{}", "the text", []),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "the text", []),
    ("glm45", "<tool_call>g</tool_call> <tool_call>f", "the text", []),
    ("gemma4", "<|tool_call>call:g{}<tool_call|>", "the text", []),
    # Cut short.
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nab", "", [("f", '{"s": "ab')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n", "", [("f", '{"n": 1')]),
    ("gemma4", '<|tool_call>call:f{s:<|"|>ab', "", [("f", '{"s":"ab')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [', "", [("f", '{"a": [')]),
    ("hermes", '<tool_call>\n{"name": "f", "argu', "the text", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]),
    ("deepseek_v3", DEEPSEEK_BEGIN + deepseek("f", "{}")[:-3], "", [("f", "{}")]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_taken_out_of_the_text(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    expected = (text if content == "the text" else content, calls)
    assert read(form, text) == expected
    assert read(form, *text) == expected
    for at in range(len(text)):
        assert read(form, text[:at], text[at:]) == expected
    whole = AnswerParser(form_of(form), FUNCTIONS).whole(text)
    assert (whole[0], [(part.name, part.arguments) for part in whole[1]]) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(form_of("hermes"), FUNCTIONS)
    assert parser.push('Hm <tool_call>\n{"name": "f", "arg') == ("Hm ", [], "")
    assert parser.push('uments": {"a"') == ("", [CallPart(0, "f", '{"a"')], "")
    assert parser.push(": 1}") == ("", [CallPart(0, None, ": 1}")], "")
    assert parser.push("}\n</tool_call>") == ("", [], "")
    assert parser.flush() == ("", [], "")


def test_the_first_call_alone_without_parallel_ones() -> None:
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}'
    assert read("llama3_json", text, parallel=False) == ("", [("f", '{"a": 1}')])


PIECES = st.sampled_from(
    [
        *MARKS,
        "f",
        "get_weather",
        '{"name": "f"',
        '"arguments": ',
        "{}",
        "{",
        "}",
        ",",
        ":",
        '"',
        "\\",
        "\n",
        "```json\n",
        "functions.f:0",
        "<function=f>",
        "<parameter=s>",
        "</parameter>",
        "call:f{",
    ]
)
RANDOM = st.lists(PIECES | st.text(max_size=3), max_size=15)


@settings(max_examples=60)
@given(st.sampled_from(FORMATS), RANDOM)
def test_no_text_is_an_error_and_splits_do_not_matter(form: ToolFormat, pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = read(form, text)
    assert read(form, *pieces) == expected
    assert read(form, *text) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(MARKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


def kimi(number: int, name: str, arguments: str) -> str:
    return f"{KIMI_CALL}functions.{name}:{number}{KIMI_ARGUMENTS}{arguments}{KIMI_CALL_END}"


@settings(max_examples=30)
@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "harmony"]),
    st.lists(st.tuples(st.sampled_from(list(FUNCTIONS)), OBJECTS), min_size=1, max_size=3),
    st.data(),
)
def test_any_arguments_come_through(form: ToolFormat, calls: list[tuple[str, object]], data: st.DataObject) -> None:
    written = [(name, json.dumps(given, ensure_ascii=data.draw(st.booleans()))) for name, given in calls]
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
    harmony = (
        f"<|channel|>commentary to=functions.{name}<|message|>{arguments}<|call|>" for name, arguments in written
    )
    text = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "deepseek_v3": DEEPSEEK_BEGIN + "\n".join(deepseek(*each) for each in written) + DEEPSEEK_END,
        "kimi_k2": KIMI_BEGIN + "".join(kimi(at, *each) for at, each in enumerate(written)) + KIMI_END,
        "harmony": "<|start|>assistant".join(harmony),
    }[form]
    assert read(form, text) == ("", written)


KEYS = st.text("abc_", min_size=1, max_size=3)
PLAIN = st.text("ab1 {}[],:\"'\\\né<", max_size=8).filter(lambda text: "<" not in text[-1:])
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
MEMBERS = st.dictionaries(KEYS, NESTED, max_size=4)


@settings(max_examples=60)
@given(st.sampled_from(["qwen3_coder", "glm45", "gemma4"]), MEMBERS)
def test_any_members_come_through(form: ToolFormat, arguments: dict[str, Any]) -> None:
    """Whose types the schema says, but for Gemma, which writes them."""

    def plain(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    def gemma(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(gemma, value))}]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    parameters = "".join(f"<parameter={key}>\n{plain(each)}\n</parameter>\n" for key, each in arguments.items())
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{plain(each)}</arg_value>\n" for key, each in arguments.items())
    text = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n{''.join(pairs)}</tool_call>",
        "gemma4": f"<|tool_call>call:f{gemma(arguments)}<tool_call|>",
    }[form]
    kinds = {key: {"type": "string"} if isinstance(each, str) else {} for key, each in arguments.items()}
    (call,) = AnswerParser(form_of(form), {"f": {"properties": kinds}}).whole(text).calls
    assert json.loads(call.arguments) == arguments


def test_a_call_has_the_id_that_the_model_gives_it() -> None:
    text = KIMI_BEGIN + kimi(7, "f", "{}") + KIMI_END
    assert AnswerParser(form_of("kimi_k2"), FUNCTIONS).whole(text).calls == [CallPart(0, "f", "{}", "functions.f:7")]


def test_a_text_of_an_argument_comes_as_it_is_written() -> None:
    parser = AnswerParser(form_of("qwen3_coder"), FUNCTIONS)
    assert parser.push("<tool_call>\n<function=f>\n<parameter=s>\nab") == ("", [CallPart(0, "f", '{"s": "ab')], "")
    assert parser.push("\nc\n</par") == ("", [CallPart(0, None, "\\nc")], "")
    assert parser.push("ameter>\n</function>\n</tool_call>") == ("", [CallPart(0, None, '"}')], "")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null", 7]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"enum": ["a", None, [1]]}]}, {"integer", "string", "null", "array"}),
        ({"const": 1.5}, {"number"}),
        ({}, {"null", "boolean", "integer", "number", "string", "array", "object"}),
        (None, {"null", "boolean", "integer", "number", "string", "array", "object"}),
    ],
)
def test_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types


def test_what_is_held_is_bounded() -> None:
    """Arguments before the name are held back until it comes, up to a limit; then they are content."""
    for size, calls in ((MAX_HELD // 2, 1), (MAX_HELD, 0)):
        text = '<tool_call>{"arguments": {"a": "' + "x" * size + '"}, "name": "f"}</tool_call>'
        content, found = read("hermes", text)
        assert len(found) == calls
        assert content == ("" if calls else text)


@pytest.mark.parametrize("form", FORMATS)
def test_time_grows_with_the_text_alone(form: ToolFormat) -> None:
    """Of texts that begin to be calls again and again, and of long arguments."""
    nasty = {
        "hermes": '<tool_call>{"name": "f", "x": ',
        "llama3_json": '<|python_tag|>{"name": "f", ',
        "mistral": "[TOOL_CALLS][TOOL_CALLS]f[ARGS]",
        "deepseek_v3": DEEPSEEK_BEGIN + DEEPSEEK_CALL + "function",
        "kimi_k2": KIMI_BEGIN + KIMI_CALL + "functions.f:",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=o>",
        "glm45": "<tool_call>f\n<arg_key>o</arg_key><arg_value>",
        "gemma4": "<|tool_call>call:f{a:[",
        "harmony": "<|channel|>commentary to=functions.f<|message|>{}<|channel|>",
    }[form]

    def seconds(text: str) -> float:
        before = time.thread_time()
        read(form, text)
        return time.thread_time() - before

    for text in (nasty, '<tool_call>{"name": "f", "arguments": {' + "[" * 100):
        few, many = seconds(text * 40), seconds(text * 400)
        assert many < 40 * max(few, 0.001), text


@pytest.mark.parametrize("mark", MARKS)
def test_marks_can_be_found_without_going_back(mark: str) -> None:
    assert mark[0] not in mark[1:]
