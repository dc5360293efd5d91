"""No field of a body is ignored: each is served, accepted since it changes no answer, or refused by name."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.kv_hints import KvHintAction, KvHintsEnvelope
from headrace.engine.grammar.checker import CheckerConfig
from headrace.server.api.request.other_fields import OTHER_FIELDS
from headrace.server.api.request.parse import parse_body
from headrace.server.api.request.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerativeScoringBody,
    JsonSchemaFormat,
    PrefillBody,
    RerankBody,
    ResponsesBody,
    ScoreBody,
    TokenizeBody,
)
from headrace.server.frontend.grammar_checker import GrammarChecker
from headrace.server.upstream.handoff_params import TransferParams
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, json_of, running, saying, tiny_tokenizer

Kind = type[msgspec.Struct]
ROUTES: dict[Kind, dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesBody: {"input": "x"},
    GenerateBody: {"text": "x"},
    PrefillBody: {"prompt": "x", "ticket": "t"},
    TokenizeBody: {"prompt": "x"},
    ScoreBody: {"items": ["x"], "label_token_ids": [1]},
    GenerativeScoringBody: {"query": "x", "items": ["x"], "label_token_ids": [1]},
    RerankBody: {"query": "x", "documents": ["x"], "label_token_ids": [1, 2]},
    DetokenizeBody: {"tokens": [1]},
}
OTHERS = [(kind, name, field) for kind in ROUTES for name, field in OTHER_FIELDS[kind].items()]


def refused_with(kind: Kind, body: dict[str, Any]) -> ErrorInfo | None:
    try:
        parse_body(msgspec.json.encode(body), kind)
    except HeadraceError as error:
        return error.info
    return None


def refusal(kind: Kind, body: dict[str, Any]) -> tuple[str | None, str, str]:
    """Field, code and message of the refusal."""
    info = refused_with(kind, body)
    assert info is not None
    assert info.status == 400
    return info.field, info.code, info.message


@pytest.mark.parametrize("kind", ROUTES, ids=lambda kind: kind.__name__)
def test_what_is_served_is_not_among_the_others(kind: Kind) -> None:
    assert set(kind.__struct_fields__).isdisjoint(OTHER_FIELDS[kind])
    assert kind.__struct_config__.forbid_unknown_fields


def test_every_object_in_a_body_is_strict_but_those_of_routers() -> None:
    for kind in OTHER_FIELDS:
        assert kind.__struct_config__.forbid_unknown_fields, kind


@pytest.mark.parametrize(("kind", "name", "field"), OTHERS, ids=lambda each: getattr(each, "__name__", str(each)[:30]))
def test_other_fields_are_refused_or_change_nothing(kind: Kind, name: str, field: Any) -> None:
    body = ROUTES[kind]
    plain = parse_body(msgspec.json.encode(body), kind)
    for neutral in (None, False, "", [], {}, *field.neutral):
        assert parse_body(msgspec.json.encode(body | {name: neutral}), kind) == plain
    asking = body | {name: "something"}
    if field.refused:
        at, code, message = refusal(kind, asking)
        assert (at, code) == (name, "unsupported")
        assert message == f"{name} is not supported ({field.why}); leave it out"
    else:
        assert parse_body(msgspec.json.encode(asking), kind) == plain


@pytest.mark.parametrize(
    ("kind", "body", "field", "words"),
    [
        (CompletionBody, {"prompt": "x", "max_token": 3}, "max_token", "did you mean max_tokens?"),
        (CompletionBody, {"prompt": "x", "bad_words": ["y"]}, "bad_words", "not supported"),
        (
            ChatBody,
            {"messages": [], "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "usage?",
        ),
        (ChatBody, {"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents", "did you mean content?"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call",
            "send tool_calls",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "video_url": "y"}]}]},
            "messages[0].content[0].video_url",
            "text and images only",
        ),
        (ResponsesBody, {"input": [{"role": "user", "content": "x", "zzz": 1}]}, "input[0].zzz", "unknown field zzz"),
        (
            GenerateBody,
            {"text": "x", "sampling_params": {"max_tokens": 3}},
            "sampling_params.max_tokens",
            "max_new_tokens?",
        ),
        (
            GenerateBody,
            {"text": "x", "sampling_params": {"stop_regex": "a"}},
            "sampling_params.stop_regex",
            "not served",
        ),
        (PrefillBody, {"token_ids": [1], "ticket": "t"}, "token_ids", "did you mean prompt_token_ids?"),
        (TokenizeBody, {"text": "x"}, "text", "did you mean prompt?"),
        (CompletionBody, {"prompt": "x", "max_new_tokens": 4}, "max_new_tokens", "did you mean max_tokens?"),
        (GenerateBody, {"text": "x", "lora_path": "a"}, "lora_path", "name the adapter as model"),
        (TokenizeBody, {"prompt": "x", "return_token_strs": True}, "return_token_strs", "ask POST /detokenize"),
        (DetokenizeBody, {"tokens": [1], "token": 1}, "token", "did you mean tokens?"),
    ],
)
def test_the_field_is_named_and_the_nearest_one(kind: Kind, body: dict[str, Any], field: str, words: str) -> None:
    at, _, message = refusal(kind, body)
    assert at == field
    assert words in message


NESTED: list[tuple[Kind, dict[str, Any], str, str]] = [
    (
        CompletionBody,
        {"structured_outputs": {"regex": "a", "structural_tag": "b"}},
        "structured_outputs.structural_tag",
        "unsupported",
    ),
    (PrefillBody, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown_field"),
    (ChatBody, {"response_format": {"type": "json_object", "schemas": 1}}, "response_format.schemas", "unknown_field"),
    (
        ChatBody,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stricter": True}}},
        "response_format.json_schema.stricter",
        "unknown_field",
    ),
    (ResponsesBody, {"text": {"verbosity": "low"}}, "text.verbosity", "unsupported"),
    (ResponsesBody, {"text": {"format": {"type": "text", "zzz": 1}}}, "text.format.zzz", "unknown_field"),
    (ResponsesBody, {"previous_response_id": "resp_1"}, "previous_response_id", "unsupported"),
    (GenerateBody, {"sampling_params": {"custom_params": {"x": 1}}}, "sampling_params.custom_params", "unsupported"),
    (PrefillBody, {"structural_tag": "x"}, "structural_tag", "unsupported"),
]


@pytest.mark.parametrize(
    ("kind", "more", "field", "code"), NESTED, ids=lambda each: each if isinstance(each, str) else ""
)
def test_fields_of_constraints_and_formats_count_too(kind: Kind, more: dict[str, Any], field: str, code: str) -> None:
    assert refusal(kind, ROUTES[kind] | more)[:2] == (field, code)


def test_labels_of_a_format_change_nothing() -> None:
    named = {"name": "n", "description": "d", "strict": True, "schema": {"additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": named}
    parsed = parse_body(msgspec.json.encode(ROUTES[ChatBody] | {"response_format": form}), ChatBody)
    assert parsed.response_format is not None
    assert parsed.response_format.json_schema == JsonSchemaFormat(schema={"additionalProperties": False})


def objects_in(annotation: Any) -> set[Kind]:
    """Structs that a type may have at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        fields = msgspec.structs.fields(annotation)
        return {annotation}.union(*(objects_in(field.type) for field in fields))
    return set().union(*(objects_in(each) for each in get_args(annotation)))


@pytest.mark.parametrize("kind", ROUTES, ids=lambda kind: kind.__name__)
def test_every_object_of_a_body_has_its_fields_in_the_table(kind: Kind) -> None:
    others = {TransferParams, KvHintsEnvelope, KvHintAction}  # routers and frameworks put theirs in
    assert objects_in(kind) - others <= set(OTHER_FIELDS)


def test_what_routers_put_into_kv_transfer_params_is_theirs() -> None:
    body = {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True, "their_own": [1]}}
    parsed = parse_body(msgspec.json.encode(body), CompletionBody)
    assert parsed.kv_transfer_params is not None
    assert parsed.kv_transfer_params.do_remote_decode


def test_one_is_not_true() -> None:
    assert parse_body(b'{"prompt":"x","length_penalty":1}', CompletionBody).prompt == "x"
    assert refusal(CompletionBody, {"prompt": "x", "length_penalty": True})[0] == "length_penalty"


NAMES = st.sampled_from(sorted({name for kind in ROUTES for name in (*kind.__struct_fields__, *OTHER_FIELDS[kind])}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


MORE = st.dictionaries(NAMES | st.text(max_size=6), VALUES, max_size=4)


@given(st.sampled_from(sorted(ROUTES, key=str)), MORE)
def test_no_field_is_dropped_in_silence(kind: Kind, more: dict[str, Any]) -> None:
    """A body that is taken has each of its fields served, or known to change no answer with this value."""
    body = ROUTES[kind] | more
    error = refused_with(kind, body)
    if error is not None:
        assert error.status == 400
        assert error.field
        return
    assert not unserved(kind, body)


def unserved(kind: Kind, body: dict[str, Any]) -> list[str]:
    """Fields that are unknown, or are refused and ask for something."""
    found = []
    for name, value in body.items():
        field = OTHER_FIELDS[kind].get(name)
        if name in kind.__struct_fields__ or (field is not None and not field.refused):
            continue
        if field is None or (value not in (None, False, "", [], {}) and value not in field.neutral):
            found.append(name)
    return found


PATHS: dict[Kind, str] = {
    CompletionBody: "/v1/completions",
    ChatBody: "/v1/chat/completions",
    ResponsesBody: "/v1/responses",
    GenerateBody: "/generate",
    TokenizeBody: "/tokenize",
    ScoreBody: "/v1/score",
    GenerativeScoringBody: "/generative_scoring",
    RerankBody: "/v1/rerank",
    DetokenizeBody: "/detokenize",
}
ASKING = {"a": 1}  # no field takes it for a default


class AnyConstraint(GrammarChecker):
    """Takes every constraint."""

    def __init__(self) -> None:
        super().__init__(CheckerConfig("stub", "", 1000))

    async def problem(self, constraint: Constraint, first: int | None = None, *, client: str = "") -> str:
        return ""


@in_loop
async def test_every_route_refuses_unknown_and_unserved_fields(tokenizer: Tokenizer) -> None:
    for role, paths in (("colocated", PATHS), ("prefill", {PrefillBody: "/v1/prefill"})):
        link = FakeLink(saying(tokenizer, "h"))
        async with running(link, tokenizer, role=role, length=4000) as service, client(service) as http:
            for kind, path in paths.items():
                response = await http.post(path, json=ROUTES[kind])
                assert response.status_code == 200, response.text
                for name in ("zzz", *(name for name, field in OTHER_FIELDS[kind].items() if field.refused)):
                    response = await http.post(path, json=ROUTES[kind] | {name: ASKING})
                    error = json_of(response)["error"]
                    assert (response.status_code, error["param"]) == (400, name)
                    assert error["code"] == ("unknown_field" if name == "zzz" else "unsupported")


@in_loop
async def test_a_schema_that_is_a_text_gives_no_key_twice_either(tokenizer: Tokenizer) -> None:
    """What is no JSON is left to the check of constraints, which this one passes."""
    async with running(FakeLink(saying(tokenizer, "h")), tokenizer) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        for schema in ('{"properties":{"a":{},"\\u0061":{}}}', '{"properties":{"a":{},"b":{}}}', '{"a":1,"a"'):
            for more in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
                response = await http.post(PATHS[CompletionBody], json=ROUTES[CompletionBody] | more)
                if "u0061" not in schema:
                    assert response.status_code == 200, response.text
                    continue
                field = "guided_json" if "guided_json" in more else "structured_outputs.json"
                error = json_of(response)["error"]
                assert (response.status_code, error["code"]) == (400, "repeated_field")
                assert error["param"] == f"{field}.properties.a"
                assert error["message"] == f"{field}.properties.a is given twice; send it once"


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(sorted(PATHS, key=str)), MORE), min_size=10, max_size=20))
def test_any_body_is_served_or_refused_by_its_route(bodies: list[tuple[Kind, dict[str, Any]]]) -> None:
    """No value of any field is an error of the server, and none that is not served is taken."""

    @in_loop
    async def post_all() -> None:
        tokenizer = tiny_tokenizer()
        async with running(FakeLink(saying(tokenizer, "hello")), tokenizer) as service, client(service) as http:
            service.model._grammars = AnyConstraint()
            for kind, more in bodies:
                response = await http.post(PATHS[kind], json=ROUTES[kind] | more)
                assert response.status_code in (200, 400, 404, 413), (kind, more, response.text)
                assert response.status_code == 400 or not unserved(kind, more), (kind, more)

    post_all()
