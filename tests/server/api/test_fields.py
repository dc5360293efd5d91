"""No field of a body is ignored: each is served, accepted since it changes no answer, or refused by name."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.server.api.request.body import parse_body
from headrace.server.api.request.other_fields import OTHER_FIELDS
from headrace.server.api.request.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    PrefillBody,
    ResponsesBody,
    TokenizeBody,
)

Kind = type[msgspec.Struct]
ROUTES: dict[Kind, dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesBody: {"input": "x"},
    GenerateBody: {"text": "x"},
    PrefillBody: {"prompt": "x", "ticket": "t"},
    TokenizeBody: {"prompt": "x"},
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
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[1].tool_calls",
            "tools are not served",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]}]},
            "messages[0].content[0].image_url",
            "text models only",
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
        (GenerateBody, {"text": "x", "lora_path": "a"}, "lora_path", "adapters are not served"),
        (TokenizeBody, {"prompt": "x", "return_token_strs": True}, "return_token_strs", "ask POST /detokenize"),
        (DetokenizeBody, {"tokens": [1], "token": 1}, "token", "did you mean tokens?"),
    ],
)
def test_the_field_is_named_and_the_nearest_one(kind: Kind, body: dict[str, Any], field: str, words: str) -> None:
    at, _, message = refusal(kind, body)
    assert at == field
    assert words in message


def test_what_routers_put_into_kv_transfer_params_is_theirs() -> None:
    body = {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True, "their_own": [1]}}
    parsed = parse_body(msgspec.json.encode(body), CompletionBody)
    assert parsed.kv_transfer_params is not None
    assert parsed.kv_transfer_params.do_remote_decode


def test_one_is_not_true() -> None:
    assert parse_body(b'{"prompt":"x","length_penalty":1}', CompletionBody).prompt == "x"
    assert refusal(CompletionBody, {"prompt": "x", "length_penalty": True})[0] == "length_penalty"


def test_the_last_of_a_field_given_twice_counts_as_without_other_fields() -> None:
    twice = b'{"prompt":"x","max_tokens":3,"user":"a","max_tokens":4}'
    assert parse_body(twice, CompletionBody).max_tokens == 4


NAMES = st.sampled_from(sorted({name for kind in ROUTES for name in (*kind.__struct_fields__, *OTHER_FIELDS[kind])}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(sorted(ROUTES, key=str)), st.dictionaries(NAMES | st.text(max_size=6), VALUES, max_size=4))
def test_no_field_is_dropped_in_silence(kind: Kind, more: dict[str, Any]) -> None:
    """A body that is taken has each of its fields served, or known to change no answer with this value."""
    body = ROUTES[kind] | more
    error = refused_with(kind, body)
    if error is not None:
        assert error.status == 400
        assert error.field
        return
    for name, value in body.items():
        if name in kind.__struct_fields__:
            continue
        field = OTHER_FIELDS[kind][name]
        asks = value not in (None, False, "", [], {}) and value not in field.neutral
        assert not (field.refused and asks)
