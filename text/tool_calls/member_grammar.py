"""Grammars of arguments that are written member by member, as `member_calls` reads them. Pure."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.text.tool_calls.lark import AddedId, rules_up_to, symbols
from headrace.text.tool_calls.member_calls import types_of

EMPTY = '""'
_PLAIN = {"integer", "number", "boolean", "null"}  # what quotes of one's own make no difference to
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions", "$schema"}
_SAY_TYPES = {"type", "anyOf", "oneOf"}


class MemberForm(msgspec.Struct, frozen=True):
    """Each member is before, key, middle, value, after."""

    before: str
    middle: str
    after: str
    between: str = ""
    """Joins members."""
    quote: str = ""
    """Around strings, where values are JSON otherwise; "": any value is a text without quotes."""


def member_rules(form: MemberForm, name: str, schema: str, added_id: AddedId) -> list[str]:
    """The rules of arguments that keep to a schema, the first of this name. Members come in the order of the schema,
    and those alone that it has; any where it has none. Raises ValueError for a schema that cannot be kept to."""
    root = json.loads(schema)
    if unknown := set(root) - _OF_OBJECTS - _NOTES:
        raise ValueError(f"models of this form cannot be kept to {sorted(unknown)[0]} of arguments")
    required = root.get("required", [])
    properties: dict[str, Any] = {**root.get("properties", {})}
    properties |= {key: {} for key in required if key not in properties}
    rules: list[str] = []
    between = symbols(form.between, added_id)
    if not properties and root.get("additionalProperties") is not False:
        rules += [f"{name}: ({name}_any ({between} {name}_any)*)?"]
        key = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
        rules += _member(form, f"{name}_any", key, {}, root, added_id)
        return rules
    last = len(properties)
    for at, (key, given) in enumerate(properties.items()):
        member, lead, tail = f"{name}_m{at}", name if at == 0 else f"{name}_l{at}", f"{name}_t{at}"
        optional = key not in required
        rules.append(f"{lead}: {member} {name}_t{at + 1}" + (f" | {name}_l{at + 1}" if optional else ""))
        rules.append(f"{tail}: {between} {member} {name}_t{at + 1}" + (f" | {name}_t{at + 1}" if optional else ""))
        rules += _member(form, member, json.dumps(key), given, root, added_id)
    rules += [f"{name}_t{last}: {EMPTY}", f"{name}_l{last}: {EMPTY}" if last else f"{name}: {EMPTY}"]
    return rules


def _member(
    form: MemberForm, name: str, key: str, schema: Any, root: Mapping[str, Any], added_id: AddedId
) -> list[str]:
    """The rules of one member. key: its symbol."""
    schema = _referred(schema, root)
    head = f"{symbols(form.before, added_id)} {key} {symbols(form.middle, added_id)}"
    after = symbols(form.after, added_id)
    types = types_of(schema)
    if "string" not in types:
        if form.quote and not types <= _PLAIN:
            raise ValueError("lists and objects cannot be kept to in this form")
        value = json.dumps({**schema, **{kind: root[kind] for kind in ("$defs", "definitions") if kind in root}})
        return [f"{name}: {head} %json {value} {after}"]
    texts = _texts(schema)
    if texts is not None:
        quote = symbols(form.quote, added_id)
        return [f"{name}: {head} ({' | '.join(f'{quote} {json.dumps(each)} {quote}' for each in texts)}) {after}"]
    if isinstance(schema, Mapping) and not _is_free(schema):
        raise ValueError("a limited string cannot be kept to in this form, but for an enum")
    rules = [f"{name}: {head} {name}_text", *rules_up_to(f"{name}_text", form.quote or form.after, added_id)]
    if form.quote:
        others = types & _PLAIN
        rules[0] = f"{name}: {head} {symbols(form.quote, added_id)} {name}_text"
        if others:
            rules[0] += f" | {head} %json {json.dumps({'type': sorted(others)})}"
    return rules


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or the definition that it is nothing but the name of."""
    if isinstance(schema, Mapping) and set(schema) - _NOTES == {"$ref"}:
        _, kind, name = [*str(schema["$ref"]).split("/", 2), "", ""][:3]
        return root.get(kind, {}).get(name, schema) if kind in ("$defs", "definitions") else schema
    return schema


def _texts(schema: Any) -> list[str] | None:
    """The texts that a schema lists; None if it lists none. Raises ValueError for a list of other values, too."""
    if not isinstance(schema, Mapping) or not ("enum" in schema or "const" in schema):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if any(not isinstance(each, str) for each in values):
        raise ValueError("strings and other values in one enum cannot be kept to in this form")
    return list(values)


def _is_free(schema: Mapping[str, Any]) -> bool:
    """Whether any string will do."""
    if set(schema) - _NOTES - _SAY_TYPES:
        return False
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return not branches or any(types_of(each) == {"string"} and _is_free(each) for each in branches)
