"""Values out of the range of their type: the field, the value and the range are named, whatever else the body has."""

from typing import Any

import msgspec
import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.explain import LOOKED_AT
from headrace.server.api.request.parse import parse_body
from headrace.server.api.request.schema import CompletionBody, GenerateBody, ResponsesBody

INT64 = (1 << 63) - 1
CASES: list[tuple[type[msgspec.Struct], dict[str, Any], str, str]] = [
    (CompletionBody, {"temperature": 3}, "temperature", "is 3; it has to be from 0 to 2"),
    (CompletionBody, {"top_p": -0.1}, "top_p", "is -0.1; it has to be from 0 to 1"),
    (CompletionBody, {"deadline_s": -0.5}, "deadline_s", "is -0.5; it has to be above 0"),
    (CompletionBody, {"max_tokens": -1}, "max_tokens", "is -1; it has to be at least 0"),
    (CompletionBody, {"max_tokens": 1 << 63}, "max_tokens", f"is {1 << 63}; it has to be from 0 to {INT64}"),
    (CompletionBody, {"seed": -(1 << 64)}, "seed", f"is {-(1 << 64)}; it has to be from {-INT64 - 1} to {INT64}"),
    (CompletionBody, {"slo_ttft_ms": 2e9}, "slo_ttft_ms", "has to be above 0 and at most 1000000000"),
    (CompletionBody, {"stop": ["a", ""]}, "stop[1]", "has 0 characters; 1 to 1024 are allowed"),
    (CompletionBody, {"stop": "a" * 1025}, "stop", "has 1025 characters; at most 1024 are allowed"),
    (CompletionBody, {"stop": ["a"] * 17}, "stop", "has 17 items; at most 16 are allowed"),
    (CompletionBody, {"prompt": [1, 10**40]}, "prompt[1]", "(41 characters); it has to be from"),
    (CompletionBody, {"cache_salt": "é" * 257, "user": "me"}, "cache_salt", "has 257 characters; at most 256 are"),
    (GenerateBody, {"extra_key": ["", "k" * 300]}, "extra_key[1]", "has 300 characters; at most 256 are allowed"),
    (GenerateBody, {"sampling_params": {"top_k": -2}}, "sampling_params.top_k", "is -2; it has to be at least -1"),
    (ResponsesBody, {"max_output_tokens": 0}, "max_output_tokens", "is 0; it has to be at least 1"),
]


def refused(body: bytes, kind: type[msgspec.Struct]) -> tuple[str | None, str]:
    with pytest.raises(HeadraceError) as caught:
        parse_body(body, kind)
    assert (caught.value.info.status, caught.value.info.code) == (400, "invalid_value")
    return caught.value.info.field, caught.value.info.message


@pytest.mark.parametrize(("kind", "body", "field", "words"), CASES, ids=[field for _, _, field, _ in CASES])
def test_the_value_and_the_range_are_named(
    kind: type[msgspec.Struct], body: dict[str, Any], field: str, words: str
) -> None:
    required = {"prompt": "x"} if kind is CompletionBody else {"text": "x"} if kind is GenerateBody else {"input": "x"}
    at, message = refused(msgspec.json.encode(required | body), kind)
    assert at == field
    assert message.startswith(f"{field} ")
    assert words in message


def test_a_body_that_ends_in_no_json_has_the_range_alone() -> None:
    assert refused(b'{"prompt":"x","temperature":3, ', CompletionBody) == (
        "temperature",
        "temperature has to be from 0 to 2",
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b'"temperature":3', ("temperature", "temperature has to be from 0 to 2")),
        (
            b'"stop_token_ids":[%s0]' % (b"0," * LOOKED_AT),
            ("stop_token_ids", "stop_token_ids has to have at most 4096 items"),
        ),
    ],
)
def test_a_large_body_is_not_decoded_again_for_the_value(fields: bytes, expected: tuple[str, str]) -> None:
    body = b'{"prompt":"%s",%s}' % (b"x" * LOOKED_AT, fields)
    assert refused(body, CompletionBody) == expected
