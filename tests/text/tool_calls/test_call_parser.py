"""Tool calls in the text of each model family, wherever the text is split."""

import json
import time
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config.server import ToolFormat
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.tool_calls.call_form import MARKS, CallForm, call_form
from headrace.text.tool_calls.call_parser import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    Functions,
)
from headrace.text.tool_calls.char_reader import MAX_HELD, CallPart

FUNCTIONS: Functions = {"get_weather": {}, "f": {}}
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
    # As models deviate from them.
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
    # Cut short.
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


@settings(max_examples=30)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.sampled_from(list(FUNCTIONS)), OBJECTS), min_size=1, max_size=3),
    st.data(),
)
def test_any_arguments_come_through(form: ToolFormat, calls: list[tuple[str, object]], data: st.DataObject) -> None:
    written = [(name, json.dumps(given, ensure_ascii=data.draw(st.booleans()))) for name, given in calls]
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "deepseek_v3": DEEPSEEK_BEGIN + "\n".join(deepseek(*each) for each in written) + DEEPSEEK_END,
    }[form]
    assert read(form, text) == ("", written)


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
