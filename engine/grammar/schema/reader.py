"""Reads JSON schemas: keywords as JSON Schema (2020-12, and older drafts by $schema) has them.

A schema becomes a Node: what it says itself, and its parts in place ($ref, allOf, anyOf, oneOf, enum). Nodes have
numbers, so that a set of them names a conjunction. Annotations (such as a `format` that no vocabulary defines) are
dropped; keywords that cannot be kept to are refused, with their place.
"""

import json
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from headrace.engine.grammar.schema.parts import (
    ANYTHING,
    TYPES,
    Bound,
    Lists,
    Objects,
    Own,
    SchemaError,
    Texts,
    Type,
)

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
MAX_NODES = 20_000
MAX_NESTING = 500  # objects and arrays in each other, whatever the interpreter's own limit
LARGEST = 2**53  # integers up to here are exact in what the library computes with
OLD_DRAFTS = tuple(f"http://json-schema.org/draft-0{number}/schema" for number in (3, 4, 6, 7))
ITEMS_DRAFTS = (*OLD_DRAFTS, "https://json-schema.org/draft/2019-09/schema")  # without prefixItems

# Keywords that cannot be kept to, and values with which they say nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}


class Part(NamedTuple):
    """Schemas that hold in the same place as the one that has them: all, at least one, or exactly one of them."""

    kind: Literal["all", "any", "one"]
    nodes: tuple[int, ...]


class Node(NamedTuple):
    """A schema."""

    path: str
    own: Own | None
    """What it says itself; None for the schema `false`."""
    parts: tuple[Part, ...]
    """In their order, which is that of the properties that they bring."""
    own_at: int
    """Before which of the parts its own properties come."""


class Reader:
    """The nodes of one document. read() is called when they are needed."""

    def __init__(self, text: str) -> None:
        """Raises SchemaError for a text that is no JSON."""
        self._root = _parse(text)
        draft = self._root.get("$schema", "") if isinstance(self._root, dict) else ""
        draft = draft.rstrip("#") if isinstance(draft, str) else ""
        self._ref_alone, self._old_items = draft in OLD_DRAFTS, draft in ITEMS_DRAFTS
        self._numbers: dict[tuple[str, bool], int] = {}
        self._given: list[tuple[str, Any, bool]] = []  # path, schema, whether it lies in a schema with an $id
        self._nodes: dict[int, Node] = {}
        self.root = self._number("#", self._root, False)

    def read(self, number: int) -> Node:
        """The node of a number. Raises SchemaError for a keyword that is wrong or cannot be kept to."""
        if number not in self._nodes:
            self._nodes[number] = self._read(*self._given[number])
        return self._nodes[number]

    def check_references(self, number: int) -> None:
        """Raises SchemaError for a schema that has itself among its own parts: it says nothing."""
        done: set[int] = set()
        open_: dict[int, None] = {}
        left: list[tuple[int, bool]] = [(number, False)]
        while left:
            at, leaving = left.pop()
            if leaving:
                del open_[at]
                done.add(at)
            elif at in open_:
                raise SchemaError("it refers to itself without end", self.read(at).path)
            elif at not in done:
                open_[at] = None
                left.append((at, True))
                left += [(each, False) for part in self.read(at).parts for each in part.nodes]

    def _number(self, path: str, schema: Any, embedded: bool) -> int:
        number = self._numbers.setdefault((path, isinstance(schema, Constant)), len(self._numbers))
        if number == len(self._given):
            if number >= MAX_NODES:
                raise SchemaError(f"it is too large: it has more than {MAX_NODES} schemas")
            self._given.append((path, schema, embedded))
        return number

    def _read(self, path: str, schema: Any, embedded: bool) -> Node:
        if isinstance(schema, bool):
            return Node(path, Own() if schema else None, (), 0)
        if isinstance(schema, Constant):
            return Node(path, _constant(schema.value, path, self._number, embedded), (), 0)
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema has to be an object, true or false, not {_shown(schema)}", path)
        keyword = _Keywords(path, schema, embedded or (path != "#" and isinstance(schema.get("$id"), str)), self)
        if "$ref" in schema and self._ref_alone:
            return Node(path, Own(), (Part("all", (keyword.reference(),)),), 0)
        keyword.refuse()
        return keyword.node(old_items=self._old_items)

    def alias(self, number: int) -> int:
        """The node that a node says the same as: that of its $ref, if it has nothing else. Raises SchemaError for one
        that refers to itself."""
        seen: set[int] = set()
        while number not in seen:
            seen.add(number)
            node = self.read(number)
            if node.own != Own() or [(part.kind, len(part.nodes)) for part in node.parts] != [("all", 1)]:
                return number
            number = node.parts[0].nodes[0]
        raise SchemaError("it refers to itself without end", self.read(number).path)

    def own_of(self, number: int) -> int:
        """The number of a node that says what this one says itself, without its parts."""
        node = self.read(number)
        own = self._number(f"{node.path}.", None, False)
        self._nodes[own] = Node(node.path, node.own, (), 0)
        return own

    def child(self, path: str, schema: Any, embedded: bool) -> int:
        """The number of a schema at a path."""
        return self._number(path, schema, embedded)

    def resolve(self, pointer: str, path: str) -> int:
        """The number of the schema that a $ref names. Raises SchemaError. path: of the schema that has the $ref."""
        if pointer != "#" and not pointer.startswith("#/"):
            raise SchemaError(f"$ref {pointer!r}: only '#' and '#/…', within the schema, are supported", path)
        names = [unquote(name).replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]
        found = self._root
        for name in names:
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise SchemaError(f"$ref {pointer!r} names nothing in the schema", path)
        return self._number("/".join(["#", *map(_escaped, names)]), found, False)


class Constant(NamedTuple):
    """A schema that one value satisfies."""

    value: Any


class _Keywords:
    """The keywords of one schema."""

    def __init__(self, path: str, schema: Mapping[str, Any], embedded: bool, reader: Reader) -> None:
        self._path, self._schema, self._embedded, self._reader = path, schema, embedded, reader

    def refuse(self) -> None:
        """Raises SchemaError for keywords that cannot be kept to."""
        for name, idle in _REFUSED.items():
            if name not in self._schema or any(self._schema[name] == each for each in idle):
                continue
            if name != "if" or "then" in self._schema or "else" in self._schema:
                raise SchemaError(f"the keyword {name} is not supported", self._path)

    def node(self, *, old_items: bool) -> Node:
        parts: list[Part] = []
        own_at = None
        for name in self._schema:
            if name in ("properties", "patternProperties", "required") and own_at is None:
                own_at = len(parts)
            if (part := self._part(name)) is not None:
                parts.append(part)
        own = Own(self._types(), self._bound(), self._texts(), self._lists(old_items), self._objects())
        return Node(self._path, own, tuple(parts), len(parts) if own_at is None else own_at)

    def reference(self) -> int:
        reference = self._get("$ref", str, "a text")
        if self._embedded:
            raise SchemaError("a $ref below an $id of its own is not supported", self._path)
        return self._reader.resolve(str(reference), self._path)

    def _part(self, name: str) -> Part | None:
        match name:
            case "$ref":
                return Part("all", (self.reference(),))
            case "allOf" | "anyOf" | "oneOf":
                kinds: dict[str, Literal["all", "any", "one"]] = {"allOf": "all", "anyOf": "any", "oneOf": "one"}
                schemas = self._get(name, list, "a list of schemas")
                nodes = tuple(self._child(f"{name}/{index}", each) for index, each in enumerate(schemas))
                return Part(kinds[name], nodes)
            case "enum":
                values = self._get(name, list, "a list of values")
                return Part("any", tuple(self._child(f"enum/{at}", Constant(each)) for at, each in enumerate(values)))
            case "const":
                return Part("all", (self._child("const", Constant(self._schema[name])),))
        return None

    def _child(self, name: str, schema: Any) -> int:
        return self._reader.child(f"{self._path}/{name}", schema, self._embedded)

    def _children(self, name: str) -> dict[str, int]:
        schemas = self._get(name, dict, "an object of schemas") or {}
        return {key: self._child(f"{name}/{_escaped(key)}", schema) for key, schema in schemas.items()}

    def _types(self) -> frozenset[Type]:
        given = self._schema.get("type", list(ANYTHING))
        names = given if isinstance(given, list) else [given]
        for name in names:
            if name not in TYPES:
                raise SchemaError(f"there is no type {_shown(name)}; there are {', '.join(TYPES)}", self._path)
        return frozenset(names) - ({"integer"} if "number" in names else set())

    def _bound(self) -> Bound:
        low, high = self._limit("minimum"), self._limit("maximum")
        above, below = self._limit("exclusiveMinimum", low), self._limit("exclusiveMaximum", high)
        step = self._limit("multipleOf")
        if step is not None and step <= 0:
            raise SchemaError("multipleOf has to be above 0", self._path)
        return Bound().above(low, False).above(above, True).below(high, False).below(below, True).steps(step)

    def _limit(self, name: str, other: Fraction | None = None) -> Fraction | None:
        """A number; other: what the keyword's boolean form of draft 4 says it of."""
        if name not in self._schema:
            return None
        given = self._schema[name]
        if isinstance(given, bool) and name.startswith("exclusive"):
            return other if given else None
        if isinstance(given, bool) or not isinstance(given, int | Decimal):
            raise SchemaError(f"{name} has to be a number, not {_shown(given)}", self._path)
        return exact(given, name, self._path)

    def _texts(self) -> Texts:
        format_ = self._get("format", str, "a text")
        pattern = self._get("pattern", str, "a text")
        return Texts(
            self._count("minLength") or 0,
            self._count("maxLength"),
            frozenset((pattern,) if pattern is not None else ()),
            frozenset((format_,) if format_ in FORMATS else ()),
        )

    def _lists(self, old_items: bool) -> Lists:
        first, rest, names = [], self._schema.get("items"), ("prefixItems", "items")
        if isinstance(rest, list):
            first, rest, names = rest, self._schema.get("additionalItems"), ("items", "additionalItems")
        elif not old_items:
            first = self._get("prefixItems", list, "a list of schemas") or []
        return Lists(
            tuple(self._child(f"{names[0]}/{index}", each) for index, each in enumerate(first)),
            None if rest is None else self._child(names[1], rest),
            self._count("minItems") or 0,
            self._count("maxItems"),
        )

    def _objects(self) -> Objects:
        required = self._get("required", list, "a list of texts") or []
        if not all(isinstance(name, str) for name in required):
            raise SchemaError("required has to be a list of texts", self._path)
        additional = self._schema.get("additionalProperties")
        return Objects(
            self._children("properties"),
            self._children("patternProperties"),
            None if additional is None else self._child("additionalProperties", additional),
            tuple(dict.fromkeys(required)),
            self._count("minProperties") or 0,
            self._count("maxProperties"),
        )

    def _count(self, name: str) -> int | None:
        if name not in self._schema:
            return None
        given = self._schema[name]
        number = isinstance(given, int | Decimal) and not isinstance(given, bool) and 0 <= given <= LARGEST
        if not number or given != int(given):
            raise SchemaError(f"{name} has to be a whole number from 0 to 2^53, not {_shown(given)}", self._path)
        return int(given)

    def _get(self, name: str, kind: type, what: str) -> Any:
        given = self._schema.get(name)
        if name in self._schema and not isinstance(given, kind):
            raise SchemaError(f"{name} has to be {what}, not {_shown(given)}", self._path)
        return given


def _constant(value: Any, path: str, number: Any, embedded: bool) -> Own:
    """What says of a value that it is this one."""

    def child(name: str, each: Any) -> int:
        return int(number(f"{path}/{_escaped(name)}", Constant(each), embedded))

    if value is None:
        return Own(frozenset({"null"}))
    if isinstance(value, bool):
        return Own(frozenset({"boolean"}), truth=value)
    if isinstance(value, str):
        return Own(frozenset({"string"}), texts=Texts(constant=value))
    if isinstance(value, int | Decimal):
        given = exact(value, "a value", path)
        if given.denominator == 1 and abs(given) > LARGEST and Fraction(float(given)) != given:
            raise SchemaError(f"integers beyond 2^53, such as {value}, cannot be kept to", path)
        return Own(frozenset({"number"}), bound=Bound().above(given, False).below(given, False))
    if isinstance(value, list):
        items = tuple(child(str(index), each) for index, each in enumerate(value))
        none = int(number("false", False, False))
        return Own(frozenset({"array"}), lists=Lists(items, none, len(items), len(items)))
    properties = {name: child(name, each) for name, each in value.items()}
    none = int(number("false", False, False))
    return Own(frozenset({"object"}), objects=Objects(properties, {}, none, tuple(value)))


def exact(given: int | Decimal, name: str, path: str) -> Fraction:
    """The number that was written. Raises SchemaError for one that no double comes near to."""
    if isinstance(given, Decimal) and given and not -308 <= given.adjusted() <= 307:
        raise SchemaError(f"{name} is {given}, which is no number that can be kept to", path)
    if isinstance(given, int) and given.bit_length() > 1000:
        raise SchemaError(f"{name} has more digits than can be kept to", path)
    return Fraction(given)


def _parse(text: str) -> Any:
    def pairs(given: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(given)
        if len(found) < len(given):
            twice = next(name for at, (name, _) in enumerate(given) if name in dict(given[:at]))
            raise SchemaError(f"it has the key {twice!r} twice in one object")
        return found

    def constant(name: str) -> Any:
        raise SchemaError(f"{name} is no JSON")

    try:
        parsed = json.loads(text, parse_float=Decimal, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except ValueError as error:
        raise SchemaError(f"it is no JSON: {error}") from None
    level = [parsed]
    for _ in range(MAX_NESTING):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = list(chain.from_iterable(inner))
        if not level:
            return parsed
    raise SchemaError("it is nested too deeply")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
