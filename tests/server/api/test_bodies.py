"""Bodies that are not what a route takes, or would take too long to find out."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.config import ServerConfig
from headrace.core.runtime.process import MAX_INT_DIGITS
from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.parse import parse_body
from headrace.server.api.request.schema import ChatBody, CompletionBody, PrefillBody
from headrace.server.http import body as bodies
from headrace.server.http.structure import Limit, excess, limits, outside_strings, suspected
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, json_of, running

LONG = 1 << 17


def refused(body: bytes, kind: type[msgspec.Struct] = PrefillBody) -> tuple[str | None, str]:
    with pytest.raises(HeadraceError) as caught:
        parse_body(body, kind)
    assert caught.value.info.status == 400
    return caught.value.info.field, caught.value.info.message


def by_regular_expressions(text: str) -> tuple[str, str, str]:
    """Path, kind and name in a complaint of msgspec, by expressions that show its form; they backtrack."""
    at = re.match(r"(.*) - at `\$\.?(.*)`$", text)
    complaint, path = (at[1], at[2]) if at else (text, "")
    if unknown := re.match(r"Object contains unknown field `(.*)`", complaint):
        return path, "unknown", unknown[1]
    if missing := re.match(r"Object missing required field `(.*)`", complaint):
        return path, "missing", missing[1]
    if re.match(r"Expected `\w+` (of length )?[<>]", complaint):
        return path, "range", ""
    return path, "other", ""


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [field.encode_name for kind in (PrefillBody, ChatBody) for field in msgspec.structs.fields(kind)]
)
NAMES = FIELDS | st.from_regex(r"[A-Za-z_0-9 .-]{1,20}", fullmatch=True)


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.sampled_from([PrefillBody, ChatBody, CompletionBody]))
@example({"temperatur": 1}, PrefillBody)
@example({"messages": [{}]}, ChatBody)
@example({"messages": [{"role": "user", "content": [{}]}]}, ChatBody)
@example({"stream_options": {"include_usage": 1}, "messages": []}, ChatBody)
def test_complaints_name_the_field(body: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Where msgspec says it is; of unknown fields tests/server/api/test_fields.py has more."""
    encoded = msgspec.json.encode(body)
    try:
        msgspec.json.decode(encoded, type=kind)
    except msgspec.ValidationError as error:
        path, what, name = by_regular_expressions(str(error))
        if what == "unknown":
            return
        whole = f"{path}.{name}" if path and name else path or name
        field, message = refused(encoded, kind)
        assert field == (whole or "body")
        assert message.startswith(
            {"missing": f"{whole} is required", "range": f"{whole} ", "other": f"{whole or 'body'}: "}[what]
        )


@pytest.mark.parametrize("end", ["", "\\n"])
@pytest.mark.parametrize("unit", ["a", " - at `$", "`", "``", " - at `$.a`", "\\n", "\\u0000", "é", "a.b[0]"])
def test_a_long_name_of_a_field_is_cut_and_costs_nothing(unit: str, end: str) -> None:
    """A line that ends where no complaint does, after many places where one could, takes a search a time that grows
    with the square of the length: half a minute for 112 KB."""
    name = unit * (LONG // len(unit)) + end
    before = time.thread_time()
    field, message = refused(b'{"%s":1}' % name.encode())
    assert time.thread_time() - before < 1
    for text in (field or "", message):
        assert len(text) < 300, "it is not sent back"
        assert "characters)" in text or len(text) < 100


@given(st.text(max_size=200))
def test_whatever_a_name_is_the_answer_is_short(name: str) -> None:
    if name in PrefillBody.__struct_fields__:
        return
    field, message = refused(json.dumps({name: 1}).encode())
    assert field is not None
    assert len(message) < 400


JSON = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(["\\", '"', "\\\\", '\\"', "[", "{", ",", ":", "[],"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just('\\"[,'), inner),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Containers, fields and commas of a JSON value."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(item) for item in (value if isinstance(value, list) else value.values())]
    containers, fields, commas = (sum(each[i] for each in inner) for i in range(3))
    own = len(value) if isinstance(value, dict) else 0
    return containers + 1, fields + own, commas + max(0, len(value) - 1)


@given(JSON, st.booleans(), st.integers(1, 20))
def test_what_is_outside_of_strings_is_counted_exactly(value: Any, ascii_only: bool, slice_bytes: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    outside = b"".join(outside_strings(body, slice_bytes))
    found = outside.count(b"[") + outside.count(b"{"), outside.count(b":"), outside.count(b",")
    assert found == counted(value)
    for marks, count in zip(((b"[", b"{"), (b":",), (b",",)), found, strict=True):
        assert excess(body, (Limit("", marks, count),), slice_bytes) is None
        if count:
            assert excess(body, (Limit("", marks, count - 1),), slice_bytes) is not None
            assert suspected(body, (Limit("", marks, count - 1),))
    escapes = body.count(b"\\")
    assert excess(body, (Limit("", (b"\\",), escapes, inside=True),), slice_bytes) is None
    if escapes:
        assert excess(body, (Limit("", (b"\\",), escapes - 1, inside=True),), slice_bytes) is not None


def test_texts_and_token_ids_of_any_length_are_within_the_limits() -> None:
    size = 16 << 20
    bounds = limits(size)
    ids = b'{"prompt":[' + b",".join([b"12345"] * 699_050) + b"]}"
    text = json.dumps({"prompt": '[{,:\\"\n' * (1 << 18)}).encode()
    assert suspected(text, bounds)
    for body in (ids, text):
        assert excess(body, bounds) is None


def test_the_limits_are_those_of_the_documents() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    most = {limit.what: limit.most for limit in limits(ServerConfig().max_body_bytes)}
    assert most["values"] == 699_050
    for what in ("lists and objects", "texts", "values", "escaped characters"):
        assert f": {most[what]:,})" in page, what
    assert most["fields"] == 4 * most["lists and objects"]


CROWDS = {
    "lists": (b'{"prompt":[%s]}', b"[]", "lists and objects"),
    "lists of lists": (b'{"prompt":[%s]}', b"[[]]", "lists and objects"),
    "messages": (b'{"messages":[%s]}', b'{"role":"user"}', "lists and objects"),
    "tools": (b'{"messages":[],"tools":[%s]}', b"{}", "lists and objects"),
    "ids": (b'{"prompt":[%s]}', b"1", "values"),
    "texts": (b'{"prompt":[%s]}', b'""', "texts"),
    "rooms": (b'{"prompt":"x","bootstrap_room":[%s]}', b"1", "values"),
    "biases": (b'{"prompt":"x","logit_bias":{%s}}', b'"1":1', "fields"),
    "unknown": (b'{"prompt":"x","nobody":[%s]}', b"[]", "lists and objects"),
    "escapes": (b'{"prompt":"%s"}', rb"\n\n", "escaped characters"),
}


@pytest.mark.parametrize("name", CROWDS)
@in_loop
async def test_a_body_of_small_things_is_refused_before_it_is_decoded(
    name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, item, what = CROWDS[name]
    content = frame % b",".join([item] * ((4 << 20) // (len(item) + 1)))
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
            response = await http.post(path, content=content)
            error = json_of(response)["error"]
            assert (response.status_code, error["code"]) == (413, "body_too_large"), path
            assert f"{what}, which is the limit" in error["message"]


@in_loop
async def test_a_body_that_does_not_go_on_is_given_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SILENCE_S", 0.1)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b'{"prompt":'
            await asyncio.sleep(0.05)  # slow, and never silent for so long
        await asyncio.Event().wait()

    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        response = await http.post("/v1/completions", content=parts())
    assert (response.status_code, json_of(response)["error"]["code"]) == (408, "body_timeout")


@pytest.fixture
def few_digits() -> Iterator[None]:
    """As in a server."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_INT_DIGITS)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/prefill", "/generate", "/v1/chat/completions"])
@pytest.mark.usefixtures("few_digits")
@in_loop
async def test_numbers_without_end_are_refused(path: str, tokenizer: Tokenizer) -> None:
    number = b"9" * 4000
    bodies = [
        b'{"prompt":[%s],"prompt_token_ids":[%s],"input_ids":[%s],"messages":[],"bootstrap_room":1}' % ((number,) * 3),
        b'{"prompt":"x","text":"x","messages":[],"bootstrap_room":[%s]}' % number,
        b'{"prompt":"x","text":"x","messages":[],"seed":%s,"sampling_params":{"sampling_seed":%s}}' % (number, number),
    ]
    async with running(FakeLink(), tokenizer, role="prefill") as service, client(service) as http:
        for body in bodies:
            response = await http.post(path, content=body)
            assert response.status_code == 400, response.text
            assert len(response.text) < 1000
