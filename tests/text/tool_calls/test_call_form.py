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
from headrace.text.tool_calls.call_form import CallForm, call_form, calls_grammar, new_call_id, opening_mark
from headrace.text.tool_calls.marks import DEEPSEEK_BEGIN, DEEPSEEK_SEPARATOR, MARKS

# The passages of the families' templates that say how calls are written.
TEMPLATES: list[tuple[str, ToolFormat | None]] = [
    ('{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}', "hermes"),
    ("{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", "qwen3_coder"),
    ("{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\\n<arg_value>{{ v }}</arg_value>", "glm45"),
    ("<|tool_calls_section_begin|>{{ formatted_id }}<|tool_call_argument_begin|>", "kimi_k2"),
    ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
    ('{{- "<|start|>assistant to=functions." + name + "<|channel|>commentary json<|message|>" }}', "harmony"),
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
    ("kimi_k2", ""),
    ("harmony", ""),
]
# Their arguments are no JSON.
MEMBER_FORMS: list[tuple[ToolParser, str]] = [
    ("qwen3_coder", ""),
    ("glm45", ""),
    ("glm45", "</arg_key><arg_value>"),
    ("gemma4", ""),
]
MEMBER_SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F<"]},
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/days"},
            "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "f": {"type": "object", "properties": {}, "additionalProperties": False},
    "any": {"type": "object"},
}


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
    for seed in range(8):
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
    assert (counts == {1}) == form.single, "several calls can be made"


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
        return takes(backend, vocabulary, grammar, text)

    good, bad = (
        form.first + form.before + "f" + ":0" * form.numbered + form.middle + arguments + form.after + form.last
        for arguments in ("{}", '{"x":1}')
    )
    beside = calls_grammar(form, functions, added_id, most=2, answer='{"enum":[7,8]}')
    answers = (form.answer + "7", bad, form.answer + "9", "x" + good, "")
    assert [taken(beside, text) for text in (good, *answers)] == [True, True, *[False] * 4]
    if added_id(opening_mark(form)) is None:
        return
    within = calls_grammar(form, functions, added_id, most=2, within_text=True)
    free = (form.answer, f"{form.answer}Hello < [ <tool", good, good if form.answer else "x" + good)
    assert [taken(within, text) for text in (*free, bad, "x" + bad, good + "x")] == [True] * 4 + [False] * 3


def takes(backend: Tokenizer, vocabulary: GrammarVocabulary, grammar: str, text: str) -> bool:
    going = compile_constraint(Constraint("grammar", grammar), vocabulary)
    try:
        going.accept(backend.encode(text, add_special_tokens=False).ids)
    except GrammarError:
        return False
    return bool(going.mask()[END])


def written_by(form: CallForm, name: str, arguments: dict[str, Any]) -> str:
    """A call whose arguments are written member by member."""
    members = form.members
    assert members is not None
    texts = []
    for key, value in arguments.items():
        text = f"{members.quote}{value}{members.quote}" if isinstance(value, str) else json.dumps(value)
        texts.append(members.before + key + members.middle + text + members.after)
    return form.before + name + form.middle + members.between.join(texts) + form.after


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize(("parser", "template"), MEMBER_FORMS)
def test_calls_whose_arguments_are_no_json(parser: ToolParser, template: str, special: bool | None) -> None:
    form = form_of(parser, template)
    backend = stub_tokenizer("stub:vocab=258") if special is None else tokenizer(special)
    words = backend.get_vocab_size()
    vocabulary = GrammarVocabulary(llguidance.LLTokenizer(backend.to_str(), n_vocab=words, eos_token=[END]), words)
    functions = {name: json.dumps(given) for name, given in MEMBER_SCHEMAS.items()}
    grammar = calls_grammar(form, functions, no_token if special is None else backend.token_to_id, most=2)
    good: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", {"city": "Par {is}\n<", "days": 7}),
        ("get_weather", {"unit": "F<", "city": "", "days": 99, "sure": None}),
        ("get_weather", {"unit": "C", "city": "null", "days": 0, "sure": True}),
        ("f", {}),
        ("any", {}),
        ("any", {"a": "x y", "b": 1}),
    ]
    bad: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Paris", "days": 100}),
        ("get_weather", {"unit": "K", "city": "Paris", "days": 1}),
        ("get_weather", {"city": "Paris", "days": 1, "other": 1}),
        ("f", {"a": 1}),
        ("g", {}),
    ]
    for name, arguments in good:
        text = written_by(form, name, arguments)
        assert takes(backend, vocabulary, grammar, text), text
        assert takes(backend, vocabulary, grammar, text + form.between + text), text
        content, (call,), _ = AnswerParser(form, MEMBER_SCHEMAS).whole(text)
        assert (content, call.name, json.loads(call.arguments)) == ("", name, arguments)
    for name, arguments in bad:
        assert not takes(backend, vocabulary, grammar, written_by(form, name, arguments)), (name, arguments)


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


@pytest.mark.parametrize(
    ("form", "schema", "named"),
    [
        ("glm45", {"type": "string", "maxLength": 9}, "limited string"),
        ("glm45", {"enum": ["a", 1]}, "enum"),
        ("qwen3_coder", {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]}, "limited string"),
        ("gemma4", {"type": "array", "items": {"type": "string"}}, "lists"),
    ],
)
def test_what_a_form_cannot_keep_to_is_refused(form: ToolParser, schema: dict[str, Any], named: str) -> None:
    functions = {"f": json.dumps({"type": "object", "properties": {"a": schema}})}
    with pytest.raises(ValueError, match=f"f: .*{named}"):
        calls_grammar(form_of(form, ""), functions, no_token, most=1)
    with pytest.raises(ValueError, match="minProperties"):
        calls_grammar(form_of(form, ""), {"f": '{"minProperties": 1}'}, no_token, most=1)
