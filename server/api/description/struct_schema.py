"""JSON schemas of structs, with what msgspec's leave out: the docstrings of fields, and the other fields of bodies."""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from headrace.server.api.request.other_fields import OTHER_FIELDS, OtherField, other_fields

TEMPLATE = "#/components/schemas/{name}"
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # values that ask for nothing
Schema = dict[str, Any]
Kind = type[msgspec.Struct]


def components(given: Iterable[Any]) -> tuple[list[Schema], dict[str, Schema]]:
    """A schema for each type, and the named ones that they refer to."""
    wanted = list(given)
    schemas, named = msgspec.json.schema_components(wanted, ref_template=TEMPLATE)
    for kind in _structs(types.multi_type_info(wanted), set()):
        _complete(named[kind.__name__], kind)
    return list(schemas), named


def _complete(schema: Schema, kind: Kind) -> None:
    properties = schema.get("properties", {})  # none of those that are sent as lists
    for name, text in _docstrings(kind):
        if name in properties:
            properties[name] = {**properties[name], "description": text}
    if kind in OTHER_FIELDS:
        properties |= {name: _other(field) for name, field in sorted(other_fields(kind).items())}


def _other(field: OtherField) -> Schema:
    """Any value of a field that changes nothing, or those of a refused one that ask for nothing."""
    if not field.refused:
        return {"description": f"Accepted, changes no answer: {field.why}."}
    nothing: Schema = {"enum": [*NOTHING, *field.neutral]}
    if field.neutral_items:
        nothing = {"anyOf": [nothing, {"type": "array", "items": {"enum": [*field.neutral_items]}}]}
    return {**nothing, "description": f"Not supported ({field.why}); leave it out."}


def _structs(found: Iterable[types.Type], seen: set[Kind]) -> Iterator[Kind]:
    """Every struct that these types may have, at any depth."""
    for each in found:
        if isinstance(each, types.UnionType):
            yield from _structs(each.types, seen)
        elif isinstance(each, types.ListType | types.VarTupleType):
            yield from _structs([each.item_type], seen)
        elif isinstance(each, types.TupleType):
            yield from _structs(each.item_types, seen)
        elif isinstance(each, types.DictType):
            yield from _structs([each.value_type], seen)
        elif isinstance(each, types.StructType) and each.cls not in seen:
            seen.add(each.cls)
            yield each.cls
            yield from _structs([field.type for field in each.fields], seen)


def _docstrings(kind: Kind) -> Iterator[tuple[str, str]]:
    """Fields with the texts that follow them in the source, those of a subclass last."""
    for each in reversed(kind.__mro__):
        if each is msgspec.Struct or not issubclass(each, msgspec.Struct):
            continue
        yield from _module_docstrings(each.__module__)[each.__name__]


@cache
def _module_docstrings(module: str) -> dict[str, list[tuple[str, str]]]:
    """The same of the fields of each class of a module, which is read once."""
    found = ast.parse(inspect.getsource(sys.modules[module])).body
    return {each.name: list(_field_docstrings(each)) for each in found if isinstance(each, ast.ClassDef)}


def _field_docstrings(found: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(field.target, ast.Name):
            yield field.target.id, " ".join(ast.literal_eval(after.value).split())
