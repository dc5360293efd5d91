"""Reasoning, content and calls told apart: texts of the families, in every split."""

from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.core.config.server import ReasoningFormat, ToolFormat
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.answers.reasoning import FORMS, Opening
from headrace.text.tool_calls.call_form import call_form
from headrace.text.tool_calls.char_reader import SPACE, Functions
from headrace.text.tool_calls.marks import HARMONY_MARKS

FUNCTIONS: Functions = {"get_weather": {}, "f": {}}
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ("f", '{"a": 1}')


class Read(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def parser_of(reasoning: ReasoningFormat, opening: Opening, tools: ToolFormat | None) -> AnswerParser:
    form = call_form(tools, "") if tools is not None else None
    return AnswerParser(form, FUNCTIONS if tools else {}, FORMS[reasoning], opening)


def read(parser: AnswerParser, *pieces: str) -> Read:
    """A text in pieces, put together as clients do."""
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for found in (*map(parser.push, pieces), parser.flush()):
        reasoning += found.reasoning
        content += found.content
        for part in found.calls:
            if part.name is not None:
                calls.append((part.name, ""))
            name, arguments = calls[part.call]
            calls[part.call] = (name, arguments + part.arguments)
    return Read(reasoning, content, calls)


HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello."
GOLD: list[tuple[ReasoningFormat, Opening, ToolFormat | None, str, Read]] = [
    # Qwen3, GLM 4.5: the model opens its reasoning, or begins with the answer.
    ("think", "unsaid", None, "<think>\nHm, <b>.\n</think>\n\nHello.\n", Read("Hm, <b>.", "Hello.\n", [])),
    ("think", "unsaid", None, "\n<think>Hm</think>Hello.", Read("Hm", "Hello.", [])),
    ("think", "unsaid", None, "Hello <think>a</think>.", Read("", "Hello <think>a</think>.", [])),
    ("think", "unsaid", None, "<thin ice", Read("", "<thin ice", [])),
    ("think", "unsaid", None, "<think>\n\n</think>\n\nHello.", Read("", "Hello.", [])),
    ("think", "unsaid", None, "", Read("", "", [])),
    # DeepSeek R1 and V3.1, Qwen3.5, Kimi K2 Thinking: the prompt has opened it, or has closed it.
    ("think", "open", None, "Hm.\n</think>\n\nHello.", Read("Hm.", "Hello.", [])),
    ("think", "open", None, "<think>\nHm.\n</think>\n\nHello.", Read("Hm.", "Hello.", [])),
    ("think", "open", None, "A </thin <think> B", Read("A </thin <think> B", "", [])),
    ("think", "closed", None, "Hello.</think>", Read("", "Hello.</think>", [])),
    ("think", "unsaid", "hermes", f"<think>Hm</think>\n{HERMES_CALL}", Read("Hm", "", [F])),
    ("think", "open", "hermes", f"Hm {HERMES_CALL}", Read("Hm", "", [F])),
    ("think", "open", "hermes", f"Hm</think>So {HERMES_CALL}\n{HERMES_CALL}", Read("Hm", "So ", [F, F])),
    ("think", "unsaid", "hermes", HERMES_CALL, Read("", "", [F])),
    ("think", "closed", "hermes", f"\n<t{HERMES_CALL}", Read("", "\n<t", [F])),
    ("think", "unsaid", "hermes", f"\n\n{HERMES_CALL}{HERMES_CALL}", Read("", "\n\n", [F, F])),
    ("mistral", "unsaid", "mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', Read("", "", [F])),
    ("gemma4", "unsaid", "gemma4", "<|tool_call>call:f{a: 1}<tool_call|>", Read("", "", [("f", '{"a":1}')])),
    ("kimi", "unsaid", None, "◁think▷Hm◁/think▷Hello.", Read("Hm", "Hello.", [])),
    ("mistral", "unsaid", "mistral", '[THINK]Hm[/THINK]A[TOOL_CALLS]f[ARGS]{"a": 1}', Read("Hm", "A", [F])),
    ("seed_oss", "unsaid", None, "<seed:think>Hm</seed:think>Hello.", Read("Hm", "Hello.", [])),
    ("gemma4", "unsaid", None, "<|channel>thought\nHm.\n<channel|>Hello.", Read("Hm.", "Hello.", [])),
    ("gemma4", "unsaid", None, "<|channel>thoughts<channel|>Hello.", Read("thoughts", "Hello.", [])),
    ("gemma4", "unsaid", None, "<|channel>thought\n<channel|>Hello.", Read("", "Hello.", [])),
    ("harmony", "unsaid", None, f"{ANALYSIS}{FINAL}<|return|>", Read("Hm.", "Hello.", [])),
    ("harmony", "unsaid", None, f"{ANALYSIS}{ANALYSIS}{FINAL}", Read("Hm.\nHm.", "Hello.", [])),
    ("harmony", "unsaid", None, FINAL, Read("", "Hello.", [])),
    ("harmony", "unsaid", None, "Hello, no channel", Read("", "Hello, no channel", [])),
    ("harmony", "unsaid", None, "<|channel|>ana", Read("", "", [])),
    ("harmony", "unsaid", None, f"{ANALYSIS}{HARMONY_CALL}{{}}<|call|>", Read("Hm.", "{}", [])),
    ("harmony", "closed", None, "llo.<|return|>", Read("", "llo.", [])),
]


@pytest.mark.parametrize(("reasoning", "opening", "tools", "text", "expected"), GOLD)
def test_texts_of_the_families(
    reasoning: ReasoningFormat, opening: Opening, tools: ToolFormat | None, text: str, expected: Read
) -> None:
    assert read(parser_of(reasoning, opening, tools), text) == expected
    assert read(parser_of(reasoning, opening, tools), *text) == expected
    for at in range(len(text)):
        assert read(parser_of(reasoning, opening, tools), text[:at], text[at:]) == expected


@pytest.mark.parametrize("reasoning", FORMS)
@settings(max_examples=60)
@given(st.data(), st.sampled_from(["open", "closed", "unsaid"]), st.sampled_from([None, "hermes", "mistral"]))
def test_where_a_text_is_split_does_not_matter(
    reasoning: ReasoningFormat, data: st.DataObject, opening: Opening, tools: ToolFormat | None
) -> None:
    form = FORMS[reasoning]
    marks = [form.start, form.end, form.label, HERMES_CALL, "[TOOL_CALLS]", *form.others, HARMONY_CALL, '{"a": 1}']
    words = st.sampled_from([*marks, *(mark[:-1] for mark in marks), "a", " ", "\n", "analysis", "final"])
    pieces = data.draw(st.lists(words, max_size=10))
    whole = read(parser_of(reasoning, opening, tools), "".join(pieces))
    assert read(parser_of(reasoning, opening, tools), *pieces) == whole
    assert read(parser_of(reasoning, opening, tools), *"".join(pieces)) == whole


@given(st.text("a <>/thinké\n", max_size=30).filter(lambda text: "think>" not in text), st.text("a <>\n", max_size=20))
@example("", "")
@example("<", "<")
def test_reasoning_and_content_come_through(thought: str, answer: str) -> None:
    found = read(parser_of("think", "unsaid", None), f"<think>{thought}</think>{answer}")
    assert found == Read(thought.strip(SPACE), answer.lstrip(SPACE), [])


def test_reasoning_comes_as_it_is_written() -> None:
    parser = parser_of("think", "open", None)
    assert parser.push("Well, ").reasoning == "Well,"
    assert parser.push("it </").reasoning == " it"
    assert parser.push("b> is").reasoning == " </b> is"
    assert parser.push("\n</think>\n\nHel") == ("Hel", [], "")
    assert parser.push("lo") == ("lo", [], "")


@pytest.mark.parametrize("reasoning", FORMS)
def test_tokens_of_reasoning_are_those_between_its_marks(reasoning: ReasoningFormat) -> None:
    form = FORMS[reasoning]
    text = f"{form.start}{form.label}\nab\n{form.end}Hello."
    parser = parser_of(reasoning, "unsaid", None)
    parser.whole(text)
    begin = len(form.start + form.label)
    for size in (1, 2):  # characters of a token
        offsets = range(0, len(text), size)
        assert parser.reasoning_tokens(offsets) == len([at for at in offsets if begin <= at < begin + 4])


def test_marks_begin_with_what_is_not_in_them_again() -> None:
    """The reader goes back by no character."""
    for form in FORMS.values():
        for mark in (*form.marks, *HARMONY_MARKS, form.end):
            assert mark[0] not in mark[1:]
