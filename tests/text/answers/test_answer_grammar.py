"""Constraints that apply behind the reasoning: what they take, beside what the answer alone may be."""

import json
from collections.abc import Callable

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from headrace.core.config.server import ReasoningFormat, ToolParser
from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.compiler import GrammarError, GrammarVocabulary, compile_constraint
from headrace.engine.model.stub import END, stub_tokenizer
from headrace.text.answers.answer_grammar import after_reasoning
from headrace.text.answers.reasoning import FORMS, Opening
from headrace.text.tool_calls.call_form import call_form, calls_grammar
from headrace.text.tool_calls.marks import MARKS

SEVEN: list[Constraint] = [
    Constraint("json", '{"enum":[7]}'),
    Constraint("regex", "7"),
    Constraint("choice", '["7"]'),
    Constraint("grammar", 'start: "7"'),
]
FINAL = "<|channel|>final<|message|>"


def backend_of(marks: tuple[str, ...]) -> Tokenizer:
    made = stub_tokenizer("stub:vocab=258")
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return made


def taker(backend: Tokenizer, constraint: Constraint) -> Callable[[str], bool]:
    """Whether a text matches all of it."""
    words = backend.get_vocab_size()
    vocabulary = GrammarVocabulary(llguidance.LLTokenizer(backend.to_str(), n_vocab=words, eos_token=[END]), words)

    def taken(text: str) -> bool:
        going = compile_constraint(constraint, vocabulary)
        try:
            going.accept(backend.encode(text, add_special_tokens=False).ids)
        except GrammarError:
            return False
        return going.ended or bool(going.mask()[END])

    return taken


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("constraint", SEVEN, ids=lambda each: each.kind)
@pytest.mark.parametrize("name", FORMS)
def test_it_applies_to_what_follows_the_reasoning(name: ReasoningFormat, constraint: Constraint, marked: bool) -> None:
    """marked: the vocabulary has tokens for the marks."""
    form = FORMS[name]
    backend = backend_of(form.marks) if marked else backend_of(())
    harmony = name == "harmony"
    behind = f"<|start|>assistant{FINAL}" if harmony else "\n\n"
    begin = FINAL if harmony else ""

    def grammar(opening: Opening) -> Callable[[str], bool]:
        found = after_reasoning(constraint, form, opening, backend.token_to_id, framed=False)
        assert found is not None
        return taker(backend, found)

    thought = f"so 9, {{\n{form.end}{behind}"
    unsaid = grammar("unsaid")
    assert unsaid(f"{form.start}{form.label}{thought}7")
    assert unsaid(f"{begin}7")
    assert not unsaid(f"{form.start}{thought}9")
    assert not unsaid(f"{begin}9")
    assert not unsaid(form.start)
    opened = grammar("open")
    assert opened(f"{thought}7")
    assert not opened(f"{begin}7")
    assert not opened(f"{thought}9")
    assert after_reasoning(constraint, form, "closed", backend.token_to_id, framed=False) == constraint


CALLED: list[tuple[ReasoningFormat, ToolParser, str]] = [
    ("think", "hermes", '<tool_call>\n{"name": "f", "arguments": {"a":"x"}}\n</tool_call>'),
    ("think", "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"),
    ("think", "glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"),
    (
        "think",
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a":"x"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    ("gemma4", "gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'),
    ("harmony", "harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":"x"}'),
]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("name", "tools", "call"), CALLED)
def test_forced_calls_follow_the_reasoning(name: ReasoningFormat, tools: ToolParser, call: str, marked: bool) -> None:
    form, calls = FORMS[name], call_form(tools, "")
    assert calls is not None
    backend = backend_of(tuple(dict.fromkeys((*MARKS, *form.marks)))) if marked else backend_of(())
    schema = '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"],"additionalProperties":false}'
    grammar = calls_grammar(calls, {"f": schema}, backend.token_to_id, most=1)
    found = after_reasoning(Constraint("grammar", grammar), form, "unsaid", backend.token_to_id, framed=True)
    assert found is not None
    taken = taker(backend, found)
    thought = f"{form.start}{form.label}9{form.end}" + ("<|start|>assistant" if name == "harmony" else "\n\n")
    assert taken(call)
    assert taken(thought + call)
    assert not taken(thought)
    assert not taken(thought + call.replace("f", "g", 1))
    assert not taken("9" + call)


def test_a_grammar_in_gbnf_has_no_place() -> None:
    gbnf = Constraint("grammar", 'root ::= "7"')
    assert after_reasoning(gbnf, FORMS["think"], "open", lambda _text: None, framed=False) is None


def test_expressions_and_choices_of_any_characters() -> None:
    backend = backend_of(FORMS["think"].marks)
    for constraint, text in (
        (Constraint("regex", "a/b\\/c\n\\\\/d"), "a/b/c\n\\/d"),
        (Constraint("choice", json.dumps(['"é"\n', "x|y"])), '"é"\n'),
    ):
        found = after_reasoning(constraint, FORMS["think"], "open", backend.token_to_id, framed=False)
        assert found is not None
        assert taker(backend, found)(f"</think>{text}")
