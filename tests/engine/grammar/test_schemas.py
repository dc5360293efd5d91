"""JSON schemas as they are compiled: what keywords mean, and reasons that people understand."""

import json
from typing import Any

import pytest

from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.checker import CheckRequest, check
from headrace.engine.grammar.compiler import GrammarCompiler
from headrace.engine.model.stub import END

COMPILER = GrammarCompiler("stub:vocab=262", "", 262)
NONE: dict[str, Any] = {"type": "object", "additionalProperties": False}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
LIST = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}]}


def takes(schema: Any, text: str) -> bool:
    """Whether this is a text of a schema."""
    constraint = Constraint("json", json.dumps(schema))
    assert check(COMPILER, CheckRequest(constraint)).error == ""
    grammar = COMPILER.compile(constraint)
    return grammar.follows((*text.encode(), END))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "path"}, ['"/x"'], ["1"]),
        ({"format": "binary", "type": ["string", "null"]}, ['"x"', "null"], []),
        ({"type": "string", "format": "date"}, ['"2024-01-31"'], ['"x"']),
        ({"uniqueItems": False, "then": False, "minContains": 3}, ["[1,1]"], []),
        # a pattern that matches a declared property holds for it, too
        ({**NONE, "properties": {"s": DIGIT}, "patternProperties": {"^s$": {}}}, ['{"s":3}', "{}"], ['{"s":3,']),
        ({**NONE, "properties": {"s": DIGIT}, "patternProperties": {"^s": {"enum": [3]}}}, ['{"s":3}'], ['{"s":4}']),
        # an alternative or an optional property without a value is left out
        ({**NONE, "properties": {"s": {**DIGIT, "multipleOf": 11, "minimum": 1}, "t": {}}}, ['{"t":1}'], ['{"s":11}']),
        ({"anyOf": [{"type": "integer", "minimum": 2, "maximum": 1}, {"const": "x"}]}, ['"x"'], ["1", "2"]),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, [], []),
        (LIST, ["null", '{"n":{"n":null}}'], ['{"n":{}}']),
        # keys are what they are when they are read
        ({"properties": {"a": DIGIT}}, ['{"a":1,"b":"x"}'], ['{"a":1,"\\u0061":"x"}', '{"a":1,"a":2}']),
        ({"patternProperties": {"^a": DIGIT}}, ['{"a":1}'], ['{"\\u0061":"x"}']),
        ({"additionalProperties": DIGIT, "minProperties": 1}, ['{"a":1}', '{"a":1,"b":1}'], ["{}"]),
        ({"additionalProperties": DIGIT, "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
        ({**NONE, "properties": {"a": {}, "b": {}}, "minProperties": 2}, ['{"a":1,"b":1}'], ['{"a":1}', '{"b":1}']),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ['{"b":1}', '{"c":1}'], ["{}"]),
        ({"properties": {"a": {}}, "minProperties": 2, "required": ["a"]}, ['{"a":1,"b":1}'], ['{"a":1}']),
        ({**NONE, "properties": {"a": {}, "b": {}}, "maxProperties": 1}, ["{}", '{"b":1}'], ['{"a":1,"b":1}']),
        # keywords that belong together, with others between them, and those of other drafts
        ({"items": [DIGIT], "anyOf": [{}], "additionalItems": False}, ["[1]"], ["[1,2]"]),
        ({"prefixItems": [DIGIT], "items": False, "additionalItems": True}, ["[1]"], ['["x"]', "[1,2]"]),
        ({"patternProperties": {"^x": DIGIT}, "anyOf": [{}], "additionalProperties": False}, ['{"x":1}'], ['{"y":1}']),
        ({"$schema": "http://json-schema.org/draft-04/schema#", **DIGIT, "exclusiveMinimum": True}, ["1"], ["0"]),
        ({"$defs": {"a/b%": DIGIT}, "$ref": "#/$defs/a~1b%25"}, ["7"], ['"x"']),
        ({"$ref": "#/$defs/d", "minimum": 5, "$defs": {"d": DIGIT}}, ["7"], ["4"]),
        ({"oneOf": [{"$ref": "#/$defs/d"}, {"type": "string"}], "$defs": {"d": DIGIT}}, ["7", '"x"'], ["true"]),
        # numbers
        ({"type": "number", "exclusiveMinimum": 99, "maximum": 99.25}, ["99.1"], ["99", "99.0", "99.3"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5"], ["-0", "0"]),
        ({"allOf": [{"multipleOf": 60}, {"multipleOf": 45}], "type": "integer"}, ["180", "-360"], ["60", "45"]),
        ({"type": "integer", "maximum": 9007199254740993}, ["9007199254740992"], ["9007199254740994"]),
        ({"type": "integer", "maximum": 1e30, "minimum": 10}, ["10"], ["9"]),
        ({"minLength": 2.0, "type": "string"}, ['"ab"'], ['"a"']),
    ],
)  # fmt: skip
def test_keywords_mean_what_json_schema_means(schema: Any, good: list[str], bad: list[str]) -> None:
    if not good and not bad:
        assert "without end" in problem(schema)
        return
    for text in good:
        assert takes(schema, text), text
    for text in bad:
        assert not takes(schema, text), text


def problem(schema: Any) -> str:
    return check(COMPILER, CheckRequest(Constraint("json", json.dumps(schema)))).error


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum 5 is above maximum 3"),
        ({"type": "integer", "minimum": 3.2, "maximum": 3.8}, "there is no integer from 3.2 to 3.8"),
        ({"type": "integer", "minimum": 8, "maximum": 13, "multipleOf": 7}, "there is no multiple of 7 from 8 to 13"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems 3 is above maxItems 1"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength 3 is above maxLength 1"),
        ({**NONE, "required": ["a"]}, "the required property 'a' has no value: it is false"),
        ({**NONE, "properties": {"a": {}}, "minProperties": 2}, "minProperties is 2, and it may not have as many"),
        ({"required": ["a", "b"], "maxProperties": 1, "type": "object"}, "maxProperties is 1, and 2 are required"),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "contain each other without end"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself without end"),
        ({"type": "string", "enum": [1, 2]}, "no value is of all the types"),
        ({"enum": []}, "empty list"),
        ({"const": "a", "pattern": "b"}, "no text has all of the text 'a', the pattern 'b'"),
        ({"properties": {"a": {"not": {}}}}, "the keyword not is not supported (at #/properties/a)"),
        ({"uniqueItems": True}, "the keyword uniqueItems is not supported"),
        ({"additionalProperties": DIGIT, "minProperties": 2}, "a key may be written twice"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, "two of its alternatives may hold for the same value"),
        ({"patternProperties": {"^a": DIGIT, "b$": {}}}, "/^a/ and /b$/ may match the same name"),
        ({"type": "integer", "multipleOf": 9999991}, "multipleOf has the digits 9999991, and 10000 are the limit"),
        ({"properties": {"a": {"minLength": "3"}}}, 'minLength has to be a whole number from 0 to 2^53, not "3"'),
        ({"type": "klingon"}, 'there is no type "klingon"'),
        ({"$ref": "#/$defs/x"}, "names nothing in the schema"),
        ({"$ref": "https://example.com/x"}, "only '#' and '#/…'"),
        ({"properties": {"a": {"$id": "x", "$ref": "#"}}}, "below an $id"),
        ({"required": "a"}, "required has to be a list of texts"),
        ({"const": 2**64 - 1}, "integers beyond 2^53"),
        ({"minItems": 1e300}, "whole number"),
    ],
)  # fmt: skip
def test_reasons_are_for_people(schema: Any, why: str) -> None:
    assert why in problem(schema)


@pytest.mark.parametrize(
    "text", ['{"minItems": 1e999999999}', '{"minimum": 1e999999999}', '{"multipleOf": 1e-99999999}']
)
def test_exponents_are_no_bombs(text: str) -> None:
    assert check(COMPILER, CheckRequest(Constraint("json", text))).error


def test_a_key_twice_in_a_schema() -> None:
    assert "'a' twice" in check(COMPILER, CheckRequest(Constraint("json", '{"properties": {"a": {}, "a": {}}}'))).error


def test_schemas_within_grammars_are_kept_to_as_well() -> None:
    grammar = 'start: "<" %json {"type": "object", "properties": {"a": {"type": "integer", "format": "int8"}}} ">"'
    compiled = COMPILER.compile(Constraint("grammar", grammar))
    assert compiled.follows((*b'<{"a":1}>', END))
    assert not compiled.follows(tuple(b'<{"\\u0061'))
    assert not compiled.follows((*b"<", *b" " * 41))
    wrong = Constraint("grammar", 'start: %json {"type": "string", "minLength": 3, "maxLength": 1}')
    assert "minLength 3 is above" in check(COMPILER, CheckRequest(wrong)).error
