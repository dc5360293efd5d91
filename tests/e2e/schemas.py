"""Random JSON schemas whose texts are of bounded length, for tests of structured output."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import jsonschema

Schema = dict[str, Any]
PATTERNS = ("^[a-c]{1,3}$", "^x[0-9]+y$", "^(red|green|blue)$", "^\\d{4}-\\d{2}$", '^[^"\\\\]{0,5}$')
FORMATS = ("date", "time", "uuid", "ipv4")
NAMES = ("name", "a b", "größe", 'quo"te', "x", "_id", "items", "type")


def check_texts(post: Callable[[str, dict[str, Any]], httpx.Response], seeds: range, at_a_time: int) -> None:
    """Have completions sampled, each from the schema of a seed, and validate them."""
    with ThreadPoolExecutor(at_a_time) as executor:
        list(executor.map(lambda seed: _check_text(post, seed), seeds))


def _check_text(post: Callable[[str, dict[str, Any]], httpx.Response], seed: int) -> None:
    schema = random_schema(Random(seed))
    form = {"type": "json_schema", "json_schema": {"name": f"schema-{seed}", "schema": schema}}
    body = {"model": "tested", "prompt": f"{seed}", "response_format": form, "max_tokens": 3900, "seed": seed}
    answer = post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    try:
        jsonschema.validate(json.loads(choice["text"]), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"{schema} is not kept to by {choice['text']!r}") from error


def random_schema(random: Random) -> Schema:
    """A schema of objects and lists within each other, at most four deep."""
    return {"$defs": {"it": _scalar(random, 0)}, **_schema(random, 3)}


def _schema(random: Random, depth: int) -> Schema:
    kinds = [_scalar, _scalar, _text, _choice]
    kinds += [_object, _object, _list, _alternatives, _reference] if depth else []
    return random.choice(kinds)(random, depth)


def _scalar(random: Random, _depth: int) -> Schema:
    low = random.randint(-1000, 1000)
    high = low + random.choice((0, 1, 9, 12345))
    return random.choice(
        (
            {"type": "null"},
            {"type": "boolean"},
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low},
            {"type": "number", "minimum": low, "maximum": high + 1},
            {"type": ["integer", "null"]},
            {"type": "integer", "multipleOf": random.choice((2, 5, 7))},
        )
    )


def _text(random: Random, _depth: int) -> Schema:
    low = random.randint(0, 3)
    return {"type": "string"} | random.choice(
        (
            {"minLength": low, "maxLength": low + random.randint(0, 6)},
            {"pattern": random.choice(PATTERNS)},
            {"format": random.choice(FORMATS)},
        )
    )


def _choice(random: Random, _depth: int) -> Schema:
    values: list[Any] = [1, -2.5, "a", 'ä\n"', None, True, [1, "b"], {"c": 2}]
    some = random.sample(values, random.randint(1, 4))
    return {"const": some[0]} if len(some) == 1 else {"enum": some}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }


def _list(random: Random, depth: int) -> Schema:
    low = random.randint(0, 2)
    if low and random.random() < 0.3:
        items = [_schema(random, depth - 1) for _ in range(low)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": low}
    return {"type": "array", "items": _schema(random, depth - 1), "minItems": low, "maxItems": low + 2}


def _alternatives(random: Random, depth: int) -> Schema:
    return {"anyOf": [_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}


def _reference(random: Random, _depth: int) -> Schema:
    return {"type": "array", "items": {"$ref": "#/$defs/it"}, "minItems": 1, "maxItems": random.randint(1, 3)}
