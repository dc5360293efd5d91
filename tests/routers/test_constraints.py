"""Structured output through routers: both servers get the constraint, whatever the router does with the body."""

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest

from tests.e2e.harness import pair
from tests.e2e.schemas import check_texts, random_schema
from tests.e2e.test_constraints import MODEL
from tests.routers.fleet import Router, Site, routed
from tests.routers.test_texts import CHAT, COMPLETION, texts

pytestmark = pytest.mark.routers

SCHEMAS = 20


def text_of(router: Router, path: str, body: dict[str, Any]) -> str:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "say"}]} if path == CHAT else {"prompt": "say"}
    return texts(router.post(path, {"model": "tested", "max_tokens": 1500, **prompt, **body}))[0]


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_fields_of_both_engines(router: Router, site: Site, path: str) -> None:
    """SGLang's routers pass SGLang's fields on, and leave vLLM's out of chats."""
    pattern = "[xy]{3}z"
    bodies = ({"regex": pattern}, {"ebnf": 'root ::= [xy] [xy] [xy] "z"'})
    if router.name == "dynamo":
        bodies = ({"guided_regex": pattern}, {"guided_grammar": 'root ::= [xy] [xy] [xy] "z"'})
    elif not router.name.startswith("sglang"):
        bodies = ({"structured_outputs": {"regex": pattern}}, {"guided_regex": pattern})
    for body in bodies:
        text = text_of(router, path, body)
        assert re.fullmatch(pattern, text), f"{body} through {router.name}: {text[:99]!r}"
    site.quiet()


def test_random_schemas(router: Router, site: Site) -> None:
    for seed in range(SCHEMAS):
        schema = random_schema(Random(seed))
        form = {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema}}
        text = text_of(router, CHAT, {"response_format": form, "seed": seed})
        jsonschema.validate(json.loads(text), schema)
    site.quiet()


@pytest.mark.parametrize("sizes", [("16", "4"), ("64", "16")])
def test_a_thousand_random_schemas(sizes: tuple[str, str]) -> None:
    """Through vllm-router, whose two calls reach servers with pages of different sizes."""
    flags = [(*MODEL, "--page-size", size) for size in sizes]
    with pair(*flags) as (prefill, decode):
        here = Site(prefill, decode, 0, "tested")
        with routed("vllm-nixl", here) as router:
            check_texts(router.post, range(1000), at_a_time=8)
        here.quiet()
