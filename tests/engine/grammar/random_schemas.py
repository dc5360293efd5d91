"""Random JSON schemas over all keywords that may be kept to, with contradictions and circles; random texts under their
masks; and a validator that shares nothing with the program."""

import json
import re
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from headrace.engine.grammar.compiler import Grammar

NAMES = ("a", "b", "ab", "c", 'é"\n', "\x7f")
PATTERNS = ("^a", "b$", "^ab$", "^[abc]$", "c", "^x", "^[0-9]{1,3}$", "^(ab|cd)?$")
FORMATS = ("date", "time", "uuid", "ipv4", "path", "int32", "x")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -3, 2.5, 1.0, 7, "", "a", "ab", "é\n", "\\u0061", [], [1], [1, "a"], ["a"], {}),
    *({"a": 1}, {"a": 1, "b": None}, {"ab": "a"}, {"c": []}, {"a": {}, "x": 1}, 100, "2024-02-03", -0.5, 10**16),
)
REFERENCES = ("#/$defs/p", "#/$defs/q", "#/$defs/r~1s", "#")


class Schemas:
    """Makes schemas from random numbers."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def document(self) -> Any:
        """A schema with definitions, which may refer to each other and to themselves."""
        definitions = {name: self.schema(2) for name in ("p", "q", "r/s")}
        root = self.schema(3)
        return {"$defs": definitions, **root} if isinstance(root, dict) else root

    def schema(self, depth: int) -> Any:
        """One of at most so many levels."""
        random = self._random
        if random.random() < 0.04:
            return random.random() < 0.7
        makers = [self._numbers, self._texts, self._values, self._values, self._types]
        makers += [self._objects, self._objects, self._counted, self._arrays, self._parts, self._reference] * bool(
            depth
        )
        found = dict(random.choice(makers)(depth))
        if random.random() < 0.25:  # keywords beside each other
            more = list((found | random.choice(makers)(depth)).items())
            random.shuffle(more)
            found = dict(more)
        return found

    def _some(self, choices: dict[str, Any], likely: float = 0.5) -> dict[str, Any]:
        return {name: value for name, value in choices.items() if self._random.random() < likely}

    def _numbers(self, _depth: int) -> dict[str, Any]:
        random = self._random
        low = random.choice((-12, -1, 0, 3, 2.5, 99, 12345, -0.75))
        high = low + random.choice((-1, 0, 0.25, 1, 8, 1000))
        bounds = {"minimum": low, "maximum": high, "exclusiveMinimum": low, "exclusiveMaximum": high}
        step = {"multipleOf": random.choice((1, 2, 3, 7, 0.5, 0.25, 2.5, 10))} if random.random() < 0.3 else {}
        return {"type": random.choice(("integer", "number"))} | self._some(bounds, 0.4) | step

    def _texts(self, _depth: int) -> dict[str, Any]:
        random = self._random
        low = random.randint(0, 3)
        limits = {"minLength": low, "maxLength": low + random.choice((0, 0, 2, 5))}
        more = {"pattern": random.choice(PATTERNS)} if random.random() < 0.4 else {}
        more |= {"format": random.choice(FORMATS)} if random.random() < 0.3 else {}
        return {"type": "string", **self._some(limits, 0.6), **more}

    def _values(self, _depth: int) -> dict[str, Any]:
        some = self._random.sample(VALUES, self._random.choice((1, 1, 2, 4)))
        return {"const": some[0]} if len(some) == 1 else {"enum": some}

    def _types(self, _depth: int) -> dict[str, Any]:
        names = ("null", "boolean", "integer", "number", "string", "array", "object")
        return {"type": self._random.sample(names, self._random.choice((1, 2, 3))), "title": "x", "minLength": 1}

    def _objects(self, depth: int) -> dict[str, Any]:
        random = self._random
        names = random.sample(NAMES, random.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: self.schema(depth - 1) for name in names},
            **self._some({"required": random.sample(NAMES, random.randint(0, 2)), "minProperties": 1}, 0.4),
            **self._some({"required": names[:2]}, 0.4),
            **self._additional(depth),
        }

    def _additional(self, depth: int) -> dict[str, Any]:
        random = self._random
        found: dict[str, Any] = {}
        if random.random() < 0.35:
            patterns = random.sample(PATTERNS, random.choice((1, 1, 2)))
            found["patternProperties"] = {pattern: self.schema(depth - 1) for pattern in patterns}
        if random.random() < 0.7:
            found["additionalProperties"] = random.choice((False, False, self.schema(depth - 1)))
        return found

    def _counted(self, depth: int) -> dict[str, Any]:
        random = self._random
        low = random.randint(0, 3)
        counts = self._some({"minProperties": low, "maxProperties": low + random.choice((0, 0, 1, 2))}, 0.7)
        return self._objects(depth) | counts

    def _arrays(self, depth: int) -> dict[str, Any]:
        random = self._random
        low = random.randint(0, 2)
        first = {"prefixItems": [self.schema(depth - 1) for _ in range(random.randint(1, 2))]}
        limits = {"minItems": low, "maxItems": low + random.choice((0, 0, 1, 2))}
        return {
            "type": "array",
            **self._some(first, 0.4),
            **self._some({"items": self.schema(depth - 1), "additionalItems": False}, 0.6),
            **self._some(limits, 0.7),
            **self._some({"uniqueItems": False}, 0.1),
        }

    def _parts(self, depth: int) -> dict[str, Any]:
        kind = self._random.choice(("allOf", "anyOf", "oneOf"))
        return {kind: [self.schema(depth - 1) for _ in range(self._random.randint(1, 3))]}

    def _reference(self, _depth: int) -> dict[str, Any]:
        return {"$ref": self._random.choice(REFERENCES)}


class Walk:
    """Random texts of a grammar: bytes, mostly, and soon at an end."""

    def __init__(self, random: Random, texts: list[bytes], end: int) -> None:
        """texts: of the tokens. end: the token that ends a text."""
        self._random, self._texts, self._end = random, texts, end
        self._closing = {token for token, text in enumerate(texts) if text in (b'"', b"}", b"]")}
        self._odd = {token for token, text in enumerate(texts) if text in (b"\\", b"u", b" ")}

    def text(self, grammar: Grammar, wild: int, most: int) -> str | None:
        """A text, of which the first so many tokens are any that are allowed; None if it has no end by then. Raises
        GrammarError where nothing is allowed."""
        found: list[bytes] = []
        for step in range(most):
            if grammar.ended:
                break
            allowed = np.flatnonzero(grammar.mask()).tolist()
            assert allowed, b"".join(found)
            token = self._pick(allowed, hurry=step > wild)
            if token == self._end:
                return b"".join(found).decode()
            grammar.accept((token,))
            found.append(self._texts[token])
        return b"".join(found).decode() if grammar.ended else None

    def _pick(self, allowed: list[int], *, hurry: bool) -> int:
        random = self._random
        for preferred in ({self._end}, self._closing) if hurry else ():
            if some := [token for token in allowed if token in preferred]:
                return random.choice(some)
        if not hurry and random.random() < 0.3:
            preferred = self._closing if random.random() < 0.6 else self._odd
            if some := [token for token in allowed if token in preferred]:
                return random.choice(some)
        plain = [token for token in allowed if not self._texts[token].isspace()]
        return random.choice(plain or allowed)


def parsed(text: str, *, first: bool = False) -> Any:
    """The value of a JSON text, with exact numbers; of keys that are written twice the last one counts, or the first
    one."""
    return json.loads(text, parse_float=_number, object_pairs_hook=lambda pairs: dict(pairs[::-1] if first else pairs))


def _number(text: str) -> Decimal:
    """As it is written, but for exponents: numbers with bounds are written without them."""
    digits, _, exponent = text.lower().partition("e")
    return Decimal(digits) * (1000 if len(exponent) > 2 else Decimal(f"1e{exponent or 0}"))


def _multiple(_validator: Any, step: Any, value: Any, _schema: Any) -> Any:
    exact = Fraction(str(value)) if isinstance(value, int | Decimal) and not isinstance(value, bool) else Fraction(0)
    if (exact / Fraction(str(step))).denominator != 1:
        yield ValidationError(f"{value} is no multiple of {step}")


_Validator = extend(Draft202012Validator, {"multipleOf": _multiple})
_FORMATS = FormatChecker(())
for _name, _form in {
    "date": r"\d{4}-[01]\d-[0-3]\d",
    "time": r"\d\d:[0-5]\d:[0-6]\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
}.items():
    _FORMATS.checkers[_name] = (
        lambda value, form=_form: not isinstance(value, str) or re.fullmatch(form, value) is not None,
        (),
    )


def valid(schema: Any, value: Any) -> bool:
    """Whether a value satisfies a schema, as the independent validator has it; not one that refers to itself without
    end, where it comes there."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        return bool(_Validator(exact, format_checker=_FORMATS).is_valid(value))
    except RecursionError:
        return False
