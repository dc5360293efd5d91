"""A JSON schema as llguidance is given it: without alternatives that no finite value satisfies, without $ref beside
other keywords, allOf and oneOf, and with counts of properties that hold for the parsed object.

The library leaves to its caller what this is for: keys that are written twice are counted twice, an alternative or an
optional property without a value is a dead end in the middle of a text, and a schema whose values contain each other
without end has texts that never end. Which conjunctions have a finite value is the least fixed point of the rules in
_Values, as for the productive symbols of a grammar.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import comb
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.engine.grammar.schema.alternatives import (
    Alternative,
    Anything,
    Array,
    Conjunction,
    Expander,
    Expansion,
    Null,
    Object,
    Truth,
)
from headrace.engine.grammar.schema.library import ESCAPES, Library, written_number, written_texts
from headrace.engine.grammar.schema.parts import Number, SchemaError, Texts
from headrace.engine.grammar.schema.reader import Reader

if TYPE_CHECKING:  # see compiler.py
    import llguidance

MAX_CONJUNCTIONS = 20_000
MAX_CHOICES = 256  # subsets of optional properties, where properties are counted
MAX_FIRST = 64  # optional properties of which one is wanted
# Between the tokens of JSON; bounded, since models fall into endless whitespace.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}


def canonical(text: str, limits: "llguidance.LLParserLimits") -> str:
    """The schema that is compiled in the place of this one. Raises SchemaError for one that is wrong, that no finite
    text satisfies, or that cannot be kept to."""
    try:
        reader = Reader(text)
        return json.dumps(_Writer(_Values(reader, Library(limits))).write((reader.alias(reader.root),)))
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None


class _Values:
    """The conjunctions that a document comes to, and which of them have a finite value."""

    def __init__(self, reader: Reader, library: Library) -> None:
        self._expander = Expander(reader, library)
        self._expansions: dict[Conjunction, Expansion] = {}
        self._finite: set[Conjunction] = set()
        self._reach([(reader.alias(reader.root),)], reader)
        self._reach(self._expander.exclusive, reader)
        self._settle()
        for pair in self._expander.exclusive:
            if pair in self._finite:
                why = "two of its alternatives may hold for the same value"
                raise SchemaError(f"oneOf cannot be kept to: {why}", self._expander.path(pair[1:]))

    def of(self, conjunction: Conjunction) -> list[Alternative]:
        """The alternatives of a conjunction that have a finite value."""
        return [each for each in self._expansions[conjunction].alternatives if self._has_value(each)]

    def finite(self, conjunction: Conjunction) -> bool:
        """Whether a conjunction has a finite value."""
        return conjunction in self._finite

    def path(self, conjunction: Conjunction) -> str:
        """Where it is."""
        return self._expander.path(conjunction)

    def problem(self, conjunction: Conjunction, within: tuple[Conjunction, ...] = ()) -> str:
        """Why a conjunction has no finite value, for people."""
        if conjunction in within:
            return "its values would contain each other without end"
        found = self._expansions[conjunction]
        if not found.alternatives:
            return found.problems[0] if found.problems else "it has an empty list of alternatives"
        return self._missing(found.alternatives[0], (*within, conjunction))

    def _missing(self, alternative: Alternative, within: tuple[Conjunction, ...]) -> str:
        """Why an alternative has no finite value."""
        if isinstance(alternative, Object):
            for name in alternative.required:
                if not self.finite(child := alternative.properties[name]):
                    return f"the required property {name!r} has no value: {self.problem(child, within)}"
            return f"minProperties is {alternative.fewest}, and it may not have as many"
        assert isinstance(alternative, Array), "others have values"
        places = range(min(alternative.shortest, len(alternative.first) + 1))
        place = next(place for place in places if not self.finite(_item(alternative, place)))
        return f"item {place}, which is required, has no value: {self.problem(_item(alternative, place), within)}"

    def _reach(self, conjunctions: "Sequence[Conjunction] | dict[tuple[int, int, int], None]", reader: Reader) -> None:
        left: list[Conjunction] = list(conjunctions)
        while left:
            at = left.pop()
            if at in self._expansions:
                continue
            if len(self._expansions) >= MAX_CONJUNCTIONS:
                raise SchemaError(f"it is too large: more than {MAX_CONJUNCTIONS} schemas come of it")
            for number in at:
                reader.check_references(number)
            self._expansions[at] = self._expander.expand(at)
            left += [child for each in self._expansions[at].alternatives for child in _children(each)]

    def _settle(self) -> None:
        """Find the conjunctions with a finite value: each one may be what another one waits for."""
        waiting: dict[Conjunction, list[Conjunction]] = {}
        for at, expansion in self._expansions.items():
            for child in chain.from_iterable(map(_children, expansion.alternatives)):
                waiting.setdefault(child, []).append(at)
        left = list(self._expansions)
        while left:
            at = left.pop()
            if at not in self._finite and any(map(self._has_value, self._expansions[at].alternatives)):
                self._finite.add(at)
                left += waiting.get(at, ())

    def _has_value(self, alternative: Alternative) -> bool:
        if isinstance(alternative, Array):
            needed = range(min(alternative.shortest, len(alternative.first) + 1))
            return all(self.finite(_item(alternative, place)) for place in needed)
        if isinstance(alternative, Object):
            if not all(self.finite(alternative.properties[name]) for name in alternative.required):
                return False
            free = any(map(self.finite, (*alternative.patterns.values(), alternative.rest)))
            return free or sum(map(self.finite, alternative.properties.values())) >= alternative.fewest
        return True


def _children(alternative: Alternative) -> Iterator[Conjunction]:
    if isinstance(alternative, Array):
        yield from (*alternative.first, alternative.rest)
    elif isinstance(alternative, Object):
        yield from (*alternative.properties.values(), *alternative.patterns.values(), alternative.rest)


def _item(array: Array, place: int) -> Conjunction:
    return array.first[place] if place < len(array.first) else array.rest


class _Writer:
    """Writes a schema anew: each conjunction of objects and arrays is a definition."""

    def __init__(self, values: _Values) -> None:
        self._values = values
        self._names: dict[Conjunction, str] = {}
        self._left: list[Conjunction] = []

    def write(self, root: Conjunction) -> dict[str, Any]:
        """The schema. Raises SchemaError for a root without a finite value."""
        if not self._values.finite(root):
            raise SchemaError(f"no text satisfies it: {self._values.problem(root)}")
        schema = self._schema(root)
        definitions: dict[str, Any] = {}
        while self._left:
            at = self._left.pop()
            definitions[self._names[at]] = self._any_of(at, self._values.of(at))
        return {"x-guidance": OPTIONS, **({"$defs": definitions} if definitions else {}), **schema}

    def _schema(self, conjunction: Conjunction) -> Any:
        if not self._values.finite(conjunction):
            return False
        alternatives = self._values.of(conjunction)
        if not any(isinstance(each, Array | Object) for each in alternatives):
            return self._any_of(conjunction, alternatives)
        if conjunction not in self._names:
            self._names[conjunction] = f"n{len(self._names)}"
            self._left.append(conjunction)
        return {"$ref": f"#/$defs/{self._names[conjunction]}"}

    def _any_of(self, conjunction: Conjunction, alternatives: list[Alternative]) -> dict[str, Any]:
        if any(isinstance(each, Anything) for each in alternatives):
            return {}
        found: dict[str, dict[str, Any]] = {}
        constants: list[str] = []
        for each in alternatives:
            if isinstance(each, Texts) and each.constant is not None:
                constants.append(each.constant)  # whose lengths and patterns have been looked at
            else:
                found |= {json.dumps(schema): schema for schema in self._alternative(each, conjunction)}
        if constants:
            found["constants"] = {"type": "string", "enum": list(dict.fromkeys(constants))}
        schemas = list(found.values())
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _alternative(self, alternative: Alternative, conjunction: Conjunction) -> Iterator[dict[str, Any]]:
        match alternative:
            case Null():
                yield {"type": "null"}
            case Truth(value):
                yield {"type": "boolean"} if value is None else {"const": value}
            case Number():
                yield written_number(alternative)
            case Texts():
                yield {"type": "string", **written_texts(alternative)}
            case Array():
                yield self._array(alternative)
            case Object():
                yield from map(self._object, self._counted(alternative, conjunction))

    def _array(self, array: Array) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if array.first:
            schema["prefixItems"] = list(map(self._schema, array.first))
        if array.rest:
            schema["items"] = self._schema(array.rest)
        if array.shortest:
            schema["minItems"] = array.shortest
        if array.longest is not None:
            schema["maxItems"] = array.longest
        return schema

    def _object(self, given: "_Counted") -> dict[str, Any]:
        chosen = given.object
        schema: dict[str, Any] = {"type": "object"}
        if chosen.properties:
            schema["properties"] = {
                name: name not in given.without and self._schema(child) for name, child in chosen.properties.items()
            }
        if chosen.required:
            schema["required"] = list(chosen.required)
        # The library joins these with declared properties again, which would forbid them where no other may be.
        finite = self._values.finite
        patterns = {name: each for name, each in chosen.patterns.items() if finite(each) or finite(chosen.rest)}
        if patterns:
            schema["patternProperties"] = {name: self._schema(child) for name, child in patterns.items()}
        if chosen.rest:
            schema["additionalProperties"] = self._schema(chosen.rest)
        if chosen.fewest:
            schema["minProperties"] = chosen.fewest
        if chosen.most is not None:
            schema["maxProperties"] = chosen.most
        return schema

    def _counted(self, given: Object, conjunction: Conjunction) -> Iterator["_Counted"]:
        """Objects of which the library counts no properties but free ones, of which it may want one. A key that is
        written twice is one property, and nothing keeps the free ones from that."""
        path, finite = self._values.path(conjunction), self._values.finite
        if given.overlap:
            raise SchemaError(f"patternProperties {given.overlap} may match the same name", path)
        base = len(given.required)
        optional = [name for name, child in given.properties.items() if name not in given.required and finite(child)]
        free = any(map(finite, (*given.patterns.values(), given.rest)))
        need, room = max(0, given.fewest - base), None if given.most is None else given.most - base
        if not free and room is not None and room >= len(optional):
            room = None
        plain = given._replace(fewest=0, most=None)
        if not need and room is None:
            yield _Counted(plain)
            return
        choices = _first_ones(optional) if need == 1 and room is None else _subsets(optional, room)
        if choices is None:
            what = "minProperties" if need else "maxProperties"
            raise SchemaError(f"{what} beside {len(optional)} properties that are optional is not supported", path)
        found = False
        for some, without in choices:
            more = max(0, need - len(some))
            if more <= int(free):
                found = True
                fewest, most = (
                    (base + len(some) + more if more else 0),
                    given.most if free and room is not None else None,
                )
                chosen = plain._replace(required=(*given.required, *some), fewest=fewest, most=most)
                yield _Counted(chosen, without)
        if not found:
            why = "properties that are not declared are counted as they are written, and a key may be written twice"
            raise SchemaError(f"minProperties {given.fewest} cannot be kept to: {why}", path)


class _Counted(NamedTuple):
    """An object without some of its optional properties."""

    object: Object
    without: frozenset[str] = frozenset()


_Choices = list[tuple[tuple[str, ...], frozenset[str]]]


def _first_ones(names: list[str]) -> _Choices | None:
    """Which name may be the first one of those that are there, with those before it, or none."""
    if len(names) > MAX_FIRST:
        return None
    choices: _Choices = [((name,), frozenset(names[:place])) for place, name in enumerate(names)]
    return [*choices, ((), frozenset(names))]


def _subsets(names: list[str], room: int | None) -> _Choices | None:
    """The subsets of at most so many names, each with the other names."""
    sizes = range(min(len(names), len(names) if room is None else room) + 1)
    if sum(comb(len(names), size) for size in sizes) > MAX_CHOICES:
        return None
    return [(some, frozenset(names) - {*some}) for size in sizes for some in combinations(names, size)]
