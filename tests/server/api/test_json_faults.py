"""Bodies that are no JSON, and keys that are given twice: the error names the true cause and the place."""

import asyncio
import json
import time
import tracemalloc
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.types.errors import HeadraceError
from headrace.server.api.request import explain
from headrace.server.api.request.explain import refuse_repeated_keys
from headrace.server.api.request.parse import decode_body, decode_object
from headrace.server.api.request.schema import ChatBody, CompletionBody, GenerateBody, ResponsesBody
from headrace.server.http.body import SMALL
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, json_of, running, saying

Kind = type[msgspec.Struct]


def refusal(body: bytes, kind: Kind = CompletionBody) -> tuple[str | None, str, str]:
    """Field, code and message of the refusal."""
    with pytest.raises(HeadraceError) as caught:
        asyncio.run(decode_body(body, kind))
    info = caught.value.info
    assert info.status == 400
    return info.field, info.code, info.message


CAUSES = {
    b"": "it is empty",
    b" \r\n": "it is empty",
    b'{"prompt":"a': "ends after 12 bytes, before its end",
    b'{"prompt":"a"': "before its end",
    b'{"prompt":"a","max_tokens":1': "before its end",
    b'{"zzz":1,"prompt":"a': "before its end",
    b'{"prompt":"a\\ud83d b"}': r"\ud83d at byte 12 is half of a surrogate pair",
    b'{"prompt":"a\\ud83d"}': r"\ud83d at byte 12 is half of a surrogate pair",
    b'{"prompt":"\\udc00 b"}': r"\udc00 at byte 11 is half of a surrogate pair",
    b'{"prompt":"\\ud83d\\ud83d\\ude00"}': r"\ud83d at byte 11 is half of a surrogate pair",
    b'{"prompt":"\\ud83d\\u0041"}': r"\ud83d at byte 11 is half of a surrogate pair",
    b'{"prompt":"\\ud83d\\ude00 \\\\ud83d \\uD83D"}': r"\uD83D at byte 32 is half of a surrogate pair",
    b'{"prompt":"x","stop":["\\ud83d"]}': r"\ud83d at byte 23 is half of a surrogate pair",
    b'{"prompt":"x","user":"\\ud83d"}': r"\ud83d at byte 22 is half of a surrogate pair",
    b'{"prompt":"x","metadata":{"\\ud83d":1}}': r"\ud83d at byte 27 is half of a surrogate pair",
    b'{"prompt":"\xed\xa0\xbd"}': "half of a surrogate pair, as bytes",
    b'{"prompt":"\xff"}': "not in UTF-8 (invalid start byte)",
    b'\xef\xbb\xbf{"prompt":"x"}': "begins with a byte order mark",
    b"\xff\xfe{\0}\0": "begins with UTF-16",
    b'{"prompt":"x",}': "trailing comma in object (byte 14)",
    b"{'prompt':1}": "object keys must be strings (byte 1)",
    b'{"prompt":"x","user":' + b"[" * 100_000: "before its end",
}


@pytest.mark.parametrize("body", CAUSES, ids=lambda body: repr(body[:30]))
def test_what_is_no_json_is_said(body: bytes) -> None:
    field, code, message = refusal(body)
    assert (field, code) == (None, "invalid_json")
    assert message.startswith("the body is no valid JSON: ")
    assert CAUSES[body] in message or (len(body) > 1000 and "nested too deeply" in message)
    with pytest.raises(HeadraceError) as caught:
        asyncio.run(decode_object(body))
    assert caught.value.info.message == message or len(body) > 1000


REPEATED: list[tuple[Kind, bytes, str]] = [
    (CompletionBody, b'{"prompt":"x","max_tokens":2,"max_tokens":3}', "max_tokens"),
    (CompletionBody, b'{"prompt":"x","max_tokens":2,"max\\u005ftokens":2}', "max_tokens"),
    (CompletionBody, b'{"prompt":"x","user":"a" , "user" : "a"}', "user"),
    (CompletionBody, b'{"prompt":"x","metadata":{"a":{"b":1,"c":[{"d":1,"d":1}]}}}', "metadata.a.c[0].d"),
    (CompletionBody, b'{"prompt":"x","logit_bias":{"5":1,"5":2}}', "logit_bias.5"),
    (CompletionBody, b'{"prompt":"x","guided_json":{"type":"object","type":"array"}}', "guided_json.type"),
    (CompletionBody, b'{"prompt":"x","kv_transfer_params":{"theirs":1,"theirs":1}}', "kv_transfer_params.theirs"),
    (ChatBody, b'{"messages":[{"role":"user","content":"a"},{"role":"user","role":"tool"}]}', "messages[1].role"),
    (
        ChatBody,
        b'{"messages":[],"tools":[{"function":{"name":"f","parameters":{"properties":{"a":{},"a":{}}}}}]}',
        "tools[0].function.parameters.properties.a",
    ),
    (
        ResponsesBody,
        b'{"input":"x","text":{"format":{"type":"json_schema","schema":{"$defs":{},"$defs":{}}}}}',
        "text.format.schema.$defs",
    ),
    (GenerateBody, b'{"text":"x","sampling_params":{"n":1,"n":2}}', "sampling_params.n"),
]


@pytest.mark.parametrize(("kind", "body", "place"), REPEATED, ids=[place for _, _, place in REPEATED])
def test_a_key_that_is_given_twice_is_refused_wherever_it_is(kind: Kind, body: bytes, place: str) -> None:
    assert refusal(body, kind) == (place, "repeated_field", f"{place} is given twice; send it once")


TEXTS = st.text() | st.sampled_from(['"', '\\"', "\\\\", '{"a":1,"a":2}', "}", '":', "\\u0061"])
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["a", '"', "\\", '\\":', "{"]), inner),
    max_leaves=20,
)


class Pairs(list[tuple[str, Any]]):
    """An object as it was written."""


def repeats(value: Any) -> bool:
    """Whether an object in it has a key twice, by Python's own decoder."""
    if isinstance(value, Pairs):
        return len(dict(value)) < len(value) or any(repeats(inner) for _, inner in value)
    return isinstance(value, list) and any(map(repeats, value))


def written(value: Any, data: st.DataObject) -> str:
    """JSON of the value in which a key may be written twice, in either form, and with white space."""
    if isinstance(value, list):
        return f"[{','.join(written(item, data) for item in value)}]"
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    fields = [
        f"{json.dumps(name, ensure_ascii=data.draw(st.booleans()))}{space}:{space}{written(inner, data)}"
        for name, inner in value.items()
        for space in data.draw(st.lists(st.sampled_from(["", " ", "\n"]), min_size=1, max_size=2 if value else 1))
    ]
    return f"{{{','.join(fields)}}}"


@given(VALUES, st.data(), st.integers(1, 8) | st.just(explain.WINDOW))
@example('{"a":1,"a":2}', st.data(), 1)
def test_keys_are_found_to_repeat_where_they_do(value: Any, data: st.DataObject, window: int) -> None:
    """Wherever the windows that the body is looked at in end."""
    text = json.dumps(value) if isinstance(value, str) else written(value, data)
    body = text.encode(errors="surrogatepass")
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    found = ""
    try:
        with patch.object(explain, "WINDOW", window):
            refuse_repeated_keys(body)
    except HeadraceError as error:
        found = error.info.code
    assert found == ("repeated_field" if repeats(json.loads(text, object_pairs_hook=Pairs)) else "")


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")))
@example(b'{"zzz":1,"a')
@example(b'{"a":1}}"b":2')
def test_any_bytes_are_a_body_or_a_400(tail: bytes) -> None:
    for body in (tail, b'{"prompt":"x",' + tail, b'{"zzz":' + tail, b'{"prompt":"x","user":' + tail + b"}"):
        for decoding in (decode_body(body, CompletionBody), decode_object(body)):
            status = 400
            try:
                asyncio.run(decoding)
            except HeadraceError as error:
                status = error.info.status
            assert status == 400


def test_a_large_body_has_its_key_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = b",".join([b"12345"] * SMALL)
    body = b'{"prompt":[' + ids + b'],"metadata":{"a":1,"a":1}}'
    assert refusal(body)[0] == "metadata.a"
    monkeypatch.setattr(explain, "LOOKED_AT", 1000)
    assert refusal(body)[0] == "a", "the place would take too long"


def test_looking_for_keys_takes_little_beside_decoding() -> None:
    """Of token ids, which are the largest bodies that there are."""
    body = b'{"prompt":[' + b",".join([b"12345"] * 100_000) + b'],"max_tokens":4}'

    def least(work: Any) -> float:
        times = []
        for _ in range(9):
            before = time.thread_time()
            work()
            times.append(time.thread_time() - before)
        return min(times)

    decoding = least(lambda: msgspec.json.decode(body, type=CompletionBody))
    assert least(lambda: refuse_repeated_keys(body)) < decoding / 3


LARGE = {
    "token ids": b'{"prompt":[' + b",".join([b"12345"] * 300_000) + b"]}",
    "a text": b'{"prompt":"' + b'a \\"word\\" ' * 150_000 + b'"}',
    "texts": b'{"prompt":[' + b",".join([b'"ab"'] * 200_000) + b"]}",
    "objects": b'{"metadata":[' + b",".join([b'{"a":1}'] * 20_000) + b"]}",
    "empty objects": b'{"metadata":[' + b",".join([b"{}"] * 300_000) + b"]}",
}


@pytest.mark.parametrize("shape", LARGE)
def test_looking_for_keys_takes_no_second_copy_of_a_large_body(shape: str) -> None:
    body = bytearray(LARGE[shape])
    tracemalloc.start()
    try:
        refuse_repeated_keys(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 25 * explain.WINDOW


@in_loop
async def test_every_route_refuses_a_key_that_is_given_twice(tokenizer: Tokenizer) -> None:
    bodies = {
        "/v1/completions": b'{"prompt":"x","user":"a","user":"b"}',
        "/v1/chat/completions": b'{"messages":[{"role":"user","content":"x"}],"user":"a","user":"b"}',
        "/v1/responses": b'{"input":"x","user":"a","user":"b"}',
        "/generate": b'{"text":"x","stream":false,"stream":true}',
        "/v1/prefill": b'{"prompt":"x","handoff":"none","handoff":"none"}',
        "/tokenize": b'{"prompt":"x","prompt":"y"}',
        "/detokenize": b'{"tokens":[1],"tokens":[2]}',
    }
    async with running(FakeLink(saying(tokenizer, "h")), tokenizer) as service, client(service) as http:
        for path, body in bodies.items():
            response = await http.post(path, content=body)
            assert (response.status_code, json_of(response)["error"]["code"]) == (400, "repeated_field"), path
