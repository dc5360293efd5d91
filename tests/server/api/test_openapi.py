"""GET /openapi.json says what the routes do: it is held against bodies that are parsed and responses that are sent."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import msgspec
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.api.description import struct_schema
from headrace.server.api.description.document import document
from headrace.server.api.description.operation import described
from headrace.server.api.description.struct_schema import components
from headrace.server.api.operations.pages import DOCS
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_fields import MORE, PATHS, ROUTES, Kind, refused_with
from tests.server.api.test_status_page import ELSEWHERE, HTML_SINKS, STORES
from tests.server.api.test_tenants import EVERYONE
from tests.server.fakes import FakeLink, client, in_loop, running, saying, tiny_tokenizer

Document = dict[str, Any]
LOADED: dict[str, Document] = {}


async def fetched(role: str = "colocated", **config: Any) -> Document:
    async with running(FakeLink(), tiny_tokenizer(), role=role, **config) as service, client(service) as http:
        key = config.get("api_keys", ("",))[0]
        response = await http.get("/openapi.json", headers={"Authorization": f"Bearer {key}"})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    found: Document = response.json()
    return found


def loaded() -> Document:
    """The document of a colocated server, fetched once."""

    @in_loop
    async def load() -> None:
        LOADED["colocated"] = await fetched()

    if not LOADED:
        load()
    return LOADED["colocated"]


def validator(schema: Mapping[str, Any], of: Document) -> Any:
    whole = {**schema, "components": of["components"]}
    return jsonschema.Draft202012Validator(whole)


def body_schema(kind: Kind, of: Document) -> Mapping[str, Any]:
    path = PATHS.get(kind, "/v1/prefill")
    schema: Mapping[str, Any] = of["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


@pytest.mark.parametrize("kind", ROUTES, ids=lambda kind: kind.__name__)
def test_a_body_of_every_route_fits_its_schema(kind: Kind) -> None:
    validator(body_schema(kind, loaded()), loaded()).validate(ROUTES[kind])


@given(st.sampled_from(sorted(ROUTES, key=str)), MORE)
def test_the_schema_allows_what_is_parsed_and_nothing_else(kind: Kind, more: dict[str, Any]) -> None:
    body = ROUTES[kind] | more
    allowed = validator(body_schema(kind, loaded()), loaded()).is_valid(body)
    assert allowed == (refused_with(kind, body) is None), refused_with(kind, body)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.integers(-3, 30) | st.floats(-1, 3)
NUMERIC = sorted(
    {
        (kind, field.encode_name)
        for kind in ROUTES
        for field in msgspec.structs.fields(kind)
        if re.search(r"\b(int|float)\b", str(field.type)) and "list" not in str(field.type)
    },
    key=str,
)


@given(st.sampled_from(NUMERIC), NUMBERS)
def test_the_schema_has_the_ranges_of_numbers(field: tuple[Kind, str], value: float) -> None:
    kind, name = field
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON Schema takes 1.0 for a whole number, decoding does not
    body = ROUTES[kind] | {name: value}
    info = refused_with(kind, body)
    assert validator(body_schema(kind, loaded()), loaded()).is_valid(body) == (info is None), info
    assert info is None or info.field == name


@in_loop
async def test_responses_fit_their_schemas(tokenizer: Tokenizer) -> None:
    """Of routes that the fakes can answer; schemathesis asks real servers (make test-openapi)."""
    of = await fetched()
    async with running(FakeLink(saying(tokenizer, "hello world")), tokenizer) as service, client(service) as http:
        for path, methods in of["paths"].items():
            for method, about in methods.items():
                kind = next((kind for kind, at in PATHS.items() if at == path), None)
                if "{" in path or path in ("/v1/prefill", "/debug/trace"):
                    continue
                response = await http.request(method, path, json=None if kind is None else ROUTES[kind])
                assert str(response.status_code) in about["responses"], (path, response.text)
                if response.status_code == 200:
                    media = about["responses"]["200"]["content"]
                    assert response.headers["content-type"] in media, path
                    if "json" in response.headers["content-type"]:
                        validator(media["application/json"]["schema"], of).validate(response.json())
                else:
                    validator({"$ref": "#/components/schemas/ErrorReply"}, of).validate(response.json())


@in_loop
async def test_the_events_of_streams_fit_their_schemas(tokenizer: Tokenizer) -> None:
    of = await fetched()
    async with running(FakeLink(saying(tokenizer, "hello world")), tokenizer) as service, client(service) as http:
        for kind, path in PATHS.items():
            media = of["paths"][path]["post"]["responses"]["200"]["content"]
            if "text/event-stream" not in media:
                continue
            response = await http.post(path, json=ROUTES[kind] | {"stream": True})
            events = re.findall(r"^data: (\{.*\})$", response.text, re.MULTILINE)
            assert len(events) > 1
            for event in events:
                validator(media["text/event-stream"]["x-event"], of).validate(msgspec.json.decode(event))


@in_loop
async def test_every_field_of_a_body_is_described_and_every_other_one_has_its_reason() -> None:
    schema = (await fetched())["components"]["schemas"]["CompletionBody"]
    assert schema["properties"]["deadline_s"]["description"] == "Seconds after which the request fails with 504."
    assert schema["properties"]["suffix"]["description"].startswith("Not supported (text is continued at its end)")
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prompt"]


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
@in_loop
async def test_every_route_is_described_and_says_whether_it_needs_a_key(role: str) -> None:
    of = await fetched(role, api_keys=("k",))
    assert role.split("colocated")[0] in of["info"]["description"].lower()
    operations = {(path, method): about for path, found in of["paths"].items() for method, about in found.items()}
    ids = [about["operationId"] for about in operations.values()]
    assert len(ids) == len(set(ids))
    for (path, _), about in operations.items():
        assert ("security" in about) == (path not in EVERYONE), path
        assert ("401" in about["responses"]) == (path not in EVERYONE), path
        assert about["summary"]
    refs = set(re.findall(r'"#/components/(\w+)/(\w+)"', msgspec.json.encode(of).decode()))
    assert all(name in of["components"][kind] for kind, name in refs)


def test_without_keys_none_is_needed() -> None:
    assert "securitySchemes" not in loaded()["components"]
    assert not [about for found in loaded()["paths"].values() for about in found.values() if "security" in about]


def test_the_source_of_a_module_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds a class, and every start of a server reads them all."""
    read = []
    getsource = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda given: read.append(given) or getsource(given))
    struct_schema._module_docstrings.cache_clear()
    for _ in range(2):
        components(list(ROUTES))
    assert len(read) == len(set(read)) < 10


def test_a_route_that_says_nothing_of_itself_is_a_mistake() -> None:
    router = APIRouter()
    router.get("/described", openapi_extra=described("x", reply=int))(lambda: None)
    assert list(document("t", "1", "", [router], keys=False)["paths"]) == ["/described"]
    router.get("/silent")(lambda: None)
    with pytest.raises(KeyError):
        document("t", "1", "", [router], keys=False)


@in_loop
async def test_the_page_is_small_self_contained_and_open(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, api_keys=("k",)) as service, client(service) as http:
        page = await http.get("/docs")
        locked = await http.get("/openapi.json")
    assert (page.status_code, locked.status_code) == (200, 401)
    assert len(page.content) < 20_000, DOCS
    assert not re.search(ELSEWHERE, page.text)
    assert not [sink for sink in (*HTML_SINKS, *STORES) if sink in page.text]
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_paths_have_the_form_of_openapi() -> None:
    """{name}, whatever the router calls a parameter that may have slashes; each is described."""
    for path, methods in loaded()["paths"].items():
        names = re.findall(r"{([^}]*)}", path)
        assert all(name.isidentifier() for name in names), path
        for operation in methods.values():
            assert [each["name"] for each in operation.get("parameters", []) if each["in"] == "path"] == names
