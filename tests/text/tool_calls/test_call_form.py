"""Forms of tool calls: told by chat templates, and grammars whose texts are calls that the parser takes."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from headrace.core.config.server import ToolFormat, ToolParser
from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.compiler import GrammarError, GrammarVocabulary, compile_constraint
from headrace.engine.model.stub import CHAT_TEMPLATE, END, stub_tokenizer
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.tool_calls.call_form import MARKS, CallForm, call_form, calls_grammar, new_call_id, opening_mark
from headrace.text.tool_calls.call_parser import DEEPSEEK_BEGIN, DEEPSEEK_SEPARATOR

# The passages of the families' templates that say how calls are written.
TEMPLATES: list[tuple[str, ToolFormat | None]] = [
    ('{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}', "hermes"),
    ("{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", None),
    ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
    ('{{- "<|python_tag|>" + tool_call.name }}', "llama3_json"),
    ('{{- "[TOOL_CALLS] [" }}', "mistral"),
    ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
    (f"{{{{'{DEEPSEEK_BEGIN}function{DEEPSEEK_SEPARATOR}' + name + '```json'}}}}", "deepseek_v3"),
    (CHAT_TEMPLATE, "hermes"),
    ("{{ messages[0].content }}", None),
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "f": {"type": "object", "properties": {}, "additionalProperties": False},
}
FORMS: list[tuple[ToolParser, str]] = [
    ("hermes", ""),
    ("llama3_json", ""),
    ("mistral", ""),
    ("mistral", "[ARGS]"),
    ("deepseek_v3", "```json"),
    ("deepseek_v3", DEEPSEEK_SEPARATOR),
]


@pytest.mark.parametrize(("template", "form"), TEMPLATES)
def test_templates_tell_the_form(template: str, form: ToolFormat | None) -> None:
    found = call_form("auto", template)
    assert (found and found.format) == form


def test_a_setting_goes_before_the_template() -> None:
    found = call_form("mistral", CHAT_TEMPLATE)
    assert found is not None
    assert found.format == "mistral"


def test_ids_are_such_as_templates_accept() -> None:
    for parser, length in (("mistral", 9), ("hermes", len("call_") + 24)):
        ids = {new_call_id(form_of(parser, "")) for _ in range(50)}  # type: ignore[arg-type]
        assert len(ids) == 50
        assert {len(each) for each in ids} == {length}


def form_of(parser: ToolParser, template: str) -> CallForm:
    form = call_form(parser, template)
    assert form is not None
    return form


def tokenizer(special: bool) -> Tokenizer:
    """Bytes, and each mark as a token, which models have in either kind."""
    made = stub_tokenizer("stub:vocab=258")
    made.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    return made


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize(("parser", "template"), FORMS)
def test_what_the_grammar_allows_are_calls(parser: ToolParser, template: str, special: bool | None) -> None:
    """special: of marks; None: the vocabulary has no tokens for them."""
    form = form_of(parser, template)
    backend = stub_tokenizer("stub:vocab=258") if special is None else tokenizer(special)
    words = backend.get_vocab_size()
    vocabulary = GrammarVocabulary(llguidance.LLTokenizer(backend.to_str(), n_vocab=words, eos_token=[END]), words)
    functions = {name: json.dumps(given) for name, given in SCHEMAS.items()}
    counts = set()
    for seed in range(4):
        most = 1 + 2 * (seed % 2)
        text = calls_grammar(form, functions, no_token if special is None else backend.token_to_id, most=most)
        written = backend.decode(walk(Constraint("grammar", text), vocabulary, seed), skip_special_tokens=False)
        content, calls, _ = AnswerParser(form, SCHEMAS).whole(written)
        assert content == "", written
        assert 1 <= len(calls) <= most, written
        counts.add(len(calls))
        for call in calls:
            assert call.name is not None
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert counts != {1}, "several calls can be made"


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize(("parser", "template"), FORMS)
def test_calls_beside_other_text(parser: ToolParser, template: str, special: bool | None) -> None:
    """Calls keep to their schema, whatever else the text may be."""
    form = form_of(parser, template)
    backend = stub_tokenizer("stub:vocab=258") if special is None else tokenizer(special)
    words = backend.get_vocab_size()
    vocabulary = GrammarVocabulary(llguidance.LLTokenizer(backend.to_str(), n_vocab=words, eos_token=[END]), words)
    functions = {name: json.dumps(given) for name, given in SCHEMAS.items()}
    added_id = no_token if special is None else backend.token_to_id

    def taken(grammar: str, text: str) -> bool:
        going = compile_constraint(Constraint("grammar", grammar), vocabulary)
        try:
            going.accept(backend.encode(text, add_special_tokens=False).ids)
        except GrammarError:
            return False
        return bool(going.mask()[END])

    good, bad = (
        form.first + form.before + "f" + form.middle + arguments + form.after + form.last
        for arguments in ("{}", '{"x":1}')
    )
    beside = calls_grammar(form, functions, added_id, most=2, answer='{"enum":[7,8]}')
    assert [taken(beside, text) for text in (good, "7", bad, "9", "x" + good, "")] == [True, True, *[False] * 4]
    if added_id(opening_mark(form)) is None:
        return
    within = calls_grammar(form, functions, added_id, most=2, within_text=True)
    free = ("", "Hello < [ <tool", "x" + good, good)
    assert [taken(within, text) for text in (*free, bad, "x" + bad, good + "x")] == [True] * 4 + [False] * 3


def no_token(_text: str) -> int | None:
    """There is no such token."""
    return None


def walk(constraint: Constraint, vocabulary: GrammarVocabulary, seed: int) -> Sequence[int]:
    """Random tokens that are allowed, up to an end."""
    random, grammar, ids = Random(seed), compile_constraint(constraint, vocabulary), list[int]()
    while not grammar.ended:
        allowed = np.flatnonzero(grammar.mask()).tolist()
        token = random.choice(allowed)
        if token == END:
            if len(allowed) == 1 or random.random() < 0.2:
                break
            continue
        grammar.accept((token,))
        ids.append(token)
    return ids
