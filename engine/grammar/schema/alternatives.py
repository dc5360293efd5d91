"""What a conjunction of schemas allows, as a list of alternatives: each of one type, and without further parts.

A conjunction is a tuple of nodes, all of which hold; () is anything. The values of an alternative (items, properties)
are conjunctions in turn. Since there are finitely many, schemas that refer to each other in circles come to an end: the
construction by which automata are made deterministic (Rabin, Scott 1959), on schemas.
"""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import reduce
from itertools import chain, combinations, product
from math import prod
from typing import NamedTuple

from headrace.engine.grammar.schema.library import UNWRITTEN, Library, written_number
from headrace.engine.grammar.schema.parts import (
    TYPES,
    Bound,
    Lists,
    Number,
    Objects,
    Own,
    SchemaError,
    Texts,
    join_types,
    least,
)
from headrace.engine.grammar.schema.reader import Node, Part, Reader

Conjunction = tuple[int, ...]
MAX_WAYS = 5000  # of one conjunction
MAX_WORK = 300_000  # schemas joined, of one document


class Anything(NamedTuple):
    """Any value."""


class Null(NamedTuple):
    """null."""


class Truth(NamedTuple):
    """true or false, or one of them."""

    value: bool | None


class Array(NamedTuple):
    """An array; see Lists."""

    first: tuple[Conjunction, ...]
    rest: Conjunction
    shortest: int
    longest: int | None


class Object(NamedTuple):
    """An object; see Objects. Names that are declared are not counted among those of the patterns."""

    properties: dict[str, Conjunction]
    patterns: dict[str, Conjunction]
    rest: Conjunction
    required: tuple[str, ...]
    fewest: int
    most: int | None
    overlap: str = ""
    """Two patterns that are found in the same name, whose schemas are not joined."""


Alternative = Anything | Null | Truth | Number | Texts | Array | Object


class Expansion(NamedTuple):
    """The alternatives of a conjunction, and why others are none."""

    alternatives: tuple[Alternative, ...]
    problems: tuple[str, ...]


class Expander:
    """Expands the conjunctions of one document."""

    def __init__(self, reader: Reader, library: Library) -> None:
        self._reader, self._library = reader, library
        self._ways: dict[int, tuple[Conjunction, ...]] = {}
        self._work = 0
        self.exclusive: dict[tuple[int, int, int], None] = {}
        """Conjunctions that must not have a value, since two alternatives of a oneOf would hold for it."""

    def path(self, conjunction: Conjunction) -> str:
        """Where the first of its schemas is."""
        return self._reader.read(conjunction[0]).path if conjunction else "#"

    def expand(self, conjunction: Conjunction) -> Expansion:
        """Raises SchemaError for a schema that is wrong, too large or cannot be kept to."""
        path = self.path(conjunction)
        alternatives: list[Alternative] = []
        problems: dict[str, None] = {}
        for way in self._product([self._node_ways(number) for number in conjunction]):
            self._spend(len(way) + 1)
            nodes = [self._reader.read(number) for number in way]
            for each in self._joined(nodes, path):
                if isinstance(each, str):
                    problems[f"{each} (at {path})" if path != "#" else each] = None
                else:
                    alternatives.append(self._aliased(each))
        return Expansion(tuple(alternatives), tuple(problems))

    def _aliased(self, alternative: Alternative) -> Alternative:
        """With the same conjunctions for values of which the same is said."""

        def alias(conjunction: Conjunction) -> Conjunction:
            return tuple(dict.fromkeys(map(self._reader.alias, conjunction)))

        match alternative:
            case Array(first, rest):
                return alternative._replace(first=tuple(map(alias, first)), rest=alias(rest))
            case Object(properties, patterns, rest):
                return alternative._replace(
                    properties={name: alias(each) for name, each in properties.items()},
                    patterns={name: alias(each) for name, each in patterns.items()},
                    rest=alias(rest),
                )
        return alternative

    def _node_ways(self, number: int) -> tuple[Conjunction, ...]:
        """Conjunctions of schemas whose parts are not looked at: one of these holds where the node does."""
        if number not in self._ways:
            node = self._reader.read(number)
            parts = [self._part_ways(number, part) for part in node.parts]
            parts.insert(node.own_at, ((number,),))
            self._ways[number] = self._product(parts)
        return self._ways[number]

    def _part_ways(self, number: int, part: Part) -> tuple[Conjunction, ...]:
        ways = [self._node_ways(each) for each in part.nodes]
        if part.kind == "all":
            return self._product(ways)
        if part.kind == "one" and len(part.nodes) > 1:
            own = self._reader.own_of(number)
            self._spend(len(part.nodes) ** 2)
            self.exclusive |= dict.fromkeys((own, *pair) for pair in combinations(part.nodes, 2))
        return tuple(way for each in ways for way in each)

    def _product(self, parts: Sequence[Sequence[Conjunction]]) -> tuple[Conjunction, ...]:
        count = prod(len(part) for part in parts)
        if count > MAX_WAYS:
            raise SchemaError(f"it is too large: a schema has {count} combinations of alternatives")
        self._spend(count)
        return tuple(tuple(dict.fromkeys(chain.from_iterable(way))) for way in product(*parts))

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise SchemaError("it is too large: it has too many combinations of alternatives")

    def _joined(self, nodes: Sequence[Node], path: str) -> Iterator[Alternative | str]:
        """The alternatives of schemas without parts that all hold, and why there are no others."""
        owns = [node.own for node in nodes if node.own is not None]
        if len(owns) < len(nodes):
            yield "it is false, which no value satisfies"
            return
        if all(own == Own() for own in owns):
            yield Anything()
            return
        types = reduce(join_types, (own.types for own in owns))
        if not types:
            yield f"no value is of all the types {' and '.join(dict.fromkeys(_names(own) for own in owns))}"
        for each in (name for name in TYPES if name in types):
            match each:
                case "null":
                    yield Null()
                case "boolean":
                    truths = {own.truth for own in owns} - {None}
                    yield Truth(truths.pop() if truths else None) if len(truths) < 2 else "true is not false"
                case "integer" | "number":
                    yield self._number([own.bound for own in owns], each == "integer", path)
                case "string":
                    yield self._texts([own.texts for own in owns], path)
                case "array":
                    yield _array([own.lists for own in owns])
                case "object":
                    yield self._object([own.objects for own in owns], path)

    def _number(self, bounds: Sequence[Bound], integer: bool, path: str) -> Number | str:
        bound = reduce(Bound.joined, bounds).steps(Fraction(1) if integer else None)
        if why := bound.problem():
            return why
        whole = bound.step is not None and bound.step.denominator == 1
        number = Number(bound.integers() if whole else bound, whole)
        try:
            schema = written_number(number)
        except SchemaError as error:
            raise SchemaError(str(error), path) from error
        if "multipleOf" in schema and not self._library.has_number(schema, path):
            return f"no multiple of {schema['multipleOf']} can be written"
        return number

    def _texts(self, all_of: Sequence[Texts], path: str) -> Texts | str:
        texts = all_of[0]
        for each in all_of[1:]:
            joined = texts.joined(each)
            if joined is None:
                return f"{texts.constant!r} is not {each.constant!r}"
            texts = joined
        if why := texts.problem():
            return why
        if texts.constant is not None and UNWRITTEN.search(texts.constant) is not None:
            return f"the text {texts.constant[:40]!r} has control characters, which are not written"
        if not self._library.has_text(texts, path):
            return f"no text has all of {', '.join(_listed(texts))}"
        return texts

    def _object(self, all_of: Sequence[Objects], path: str) -> Object | str:
        fewest = max(each.fewest for each in all_of)
        most = reduce(least, (each.most for each in all_of))
        required = tuple(dict.fromkeys(name for each in all_of for name in each.required))
        if most is not None and max(fewest, len(required)) > most:
            return f"maxProperties is {most}, and {max(fewest, len(required))} are required"
        names = tuple(dict.fromkeys(chain(*(each.properties for each in all_of), required)))
        patterns = tuple(dict.fromkeys(chain(*(each.patterns for each in all_of))))
        overlap = next((pair for pair in combinations(patterns, 2) if self._library.overlap(*pair, path)), ())
        return Object(
            {name: _union(self._of_name(each, name, path) for each in all_of) for name in names},
            {
                pattern: _union(_of_pattern(each, pattern) for each in all_of)
                for pattern in patterns
                if self._library.has_more_names(pattern, names, path)
            },
            _union(_additional(each) for each in all_of),
            required,
            fewest,
            most,
            " and ".join(f"/{pattern}/" for pattern in overlap),
        )

    def _of_name(self, objects: Objects, name: str, path: str) -> Conjunction:
        """What one schema says of a property."""
        found = [objects.properties[name]] if name in objects.properties else []
        found += [node for pattern, node in objects.patterns.items() if self._library.fits(pattern, name, path)]
        return tuple(found) or _additional(objects)


def _of_pattern(objects: Objects, pattern: str) -> Conjunction:
    """What one schema says of properties with a pattern, and without the patterns of others."""
    return (objects.patterns[pattern],) if pattern in objects.patterns else _additional(objects)


def _additional(objects: Objects) -> Conjunction:
    return () if objects.additional is None else (objects.additional,)


def _array(all_of: Sequence[Lists]) -> Array | str:
    shortest, longest = max(each.shortest for each in all_of), reduce(least, (each.longest for each in all_of))
    if longest is not None and shortest > longest:
        return f"minItems {shortest} is above maxItems {longest}"
    places = max(len(each.first) for each in all_of)
    return Array(
        tuple(_union(_item(each, place) for each in all_of) for place in range(places)),
        _union(_item(each, places) for each in all_of),
        shortest,
        longest,
    )


def _item(lists: Lists, place: int) -> Conjunction:
    if place < len(lists.first):
        return (lists.first[place],)
    return () if lists.rest is None else (lists.rest,)


def _union(conjunctions: Iterable[Conjunction]) -> Conjunction:
    return tuple(dict.fromkeys(chain.from_iterable(conjunctions)))


def _names(own: Own) -> str:
    return "/".join(name for name in TYPES if name in own.types)


def _listed(texts: Texts) -> Iterator[str]:
    if texts.constant is not None:
        yield f"the text {texts.constant[:40]!r}"
    if texts.shortest or texts.longest is not None:
        yield f"the length {texts.shortest} to {'any' if texts.longest is None else texts.longest}"
    yield from (f"the pattern {each[:60]!r}" for each in sorted(texts.patterns))
    yield from (f"the format {each}" for each in sorted(texts.formats))
