"""What only llguidance can tell of a schema's expressions, since they are its dialect: whether they find a text at all,
and whether they fit a name. Asked with a vocabulary of bytes."""

import json
import re
from fractions import Fraction
from functools import cached_property
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.engine.grammar.schema.parts import Number, SchemaError, Texts, decimal

if TYPE_CHECKING:  # see compiler.py
    import llguidance

MAX_QUESTIONS = 2000  # of one schema: about a second for usual ones
MAX_STEP = 10_000  # digits of multipleOf: its automaton has as many states
TRIFLE = Fraction(1, 10**12)
LONGEST = 2**63 - 1024  # the largest double of 64 bits
QUOTE = ord('"')
# Strings are written in one way: a name that is written otherwise would not be taken for itself.
UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
ESCAPES = 'nrbtf\\"'


class Library:
    """Answers, kept: of one schema."""

    def __init__(self, limits: "llguidance.LLParserLimits") -> None:
        self._limits = limits
        self._known: dict[tuple[str, bytes], bool] = {}

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        from llguidance import LLTokenizer

        return LLTokenizer("byte")

    def has_text(self, texts: Texts, path: str) -> bool:
        """Whether a string has all this. Raises SchemaError for an expression that is none."""
        if texts.problem():
            return False
        if not texts.patterns and not texts.formats:
            return True
        return self._allows({"type": "string", **written_texts(texts)}, b"", QUOTE, path)

    def fits(self, pattern: str, name: str, path: str) -> bool:
        """Whether a pattern is found in a name."""
        return self.has_text(Texts(patterns=frozenset((pattern,)), constant=name), path)

    def overlap(self, one: str, other: str, path: str) -> bool:
        """Whether two patterns are found in the same name."""
        return self.has_text(Texts(patterns=frozenset((one, other))), path)

    def has_more_names(self, pattern: str, names: tuple[str, ...], path: str) -> bool:
        """Whether a pattern is found in a name that is none of these."""
        schema = {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": {pattern: {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 1,
        }
        return self._allows(schema, b"{", QUOTE, path)

    def has_number(self, schema: dict[str, Any], path: str) -> bool:
        """Whether a number can be written for a schema of one that has multiples."""
        return self._allows(schema, b"", None, path)

    def _allows(self, schema: dict[str, Any], begun: bytes, byte: int | None, path: str) -> bool:
        """Whether this byte, or any, may come after those that a text has begun with."""
        key = (json.dumps(schema), begun)
        if key not in self._known:
            if len(self._known) >= MAX_QUESTIONS:
                raise SchemaError(f"it is too large: it has more than {MAX_QUESTIONS} patterns and texts to compare")
            self._known[key] = self._ask(*key, byte, path)
        return self._known[key]

    def _ask(self, text: str, begun: bytes, byte: int | None, path: str) -> bool:
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"json_allowed_escapes": ESCAPES})
        except ValueError as error:
            raise SchemaError(str(error), path) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            if "Unsatisfiable" in (why := matcher.get_error()):
                return False
            raise SchemaError(why, path)
        if begun:
            matcher.consume_tokens(list(begun))
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if matcher.is_error() and "NoExtensionBias" not in (why := matcher.get_error()):
            raise SchemaError(why, path)
        return not matcher.is_error() and bool(mask[byte] if byte is not None else mask.any())


def written_number(number: Number) -> dict[str, Any]:
    """A schema of this number. Bounds that the library takes otherwise are moved inwards: into 64 bits, those of
    integers to a double, open ones of short ranges by a trifle. Raises SchemaError for numbers that it cannot keep to.
    """
    bound, whole = number.bound, number.integer
    if (bound.low is not None and bound.low > LONGEST) or (bound.high is not None and bound.high < -LONGEST):
        raise SchemaError("numbers of more than 63 bits are not supported")
    low = None if bound.low is None else max(bound.low, Fraction(-LONGEST))
    high = None if bound.high is None else min(bound.high, Fraction(LONGEST))
    schema: dict[str, Any] = {"type": "integer" if whole else "number"}
    if low is not None and high is not None:
        if low == high:
            return {"const": _double(low, inf, low.denominator == 1)}
        # Of those with the same integer part the library has an integer in the range that an open bound excludes.
        trifle = min(TRIFLE, (high - low) / 2) if high - low < 1 else Fraction(0)
        low, high = low + bound.low_open * trifle, high - bound.high_open * trifle
    if low is not None:
        schema["exclusiveMinimum" if bound.low_open else "minimum"] = _double(low, inf, whole)
    if high is not None:
        schema["exclusiveMaximum" if bound.high_open else "maximum"] = _double(high, -inf, whole)
    if bound.step is not None and not (whole and bound.step == 1):
        coefficient, _ = decimal(bound.step)
        if coefficient > MAX_STEP:
            raise SchemaError(f"multipleOf has the digits {coefficient}, and {MAX_STEP} are the limit")
        schema["multipleOf"] = _double(bound.step, inf, bound.step.denominator == 1)
    return schema


def _double(number: Fraction, towards: float, whole: bool) -> int | float:
    """A number as the library takes it; of integers, the next double from it on."""
    near = float(number)
    if not whole:
        return near
    if (Fraction(near) < number) if towards > 0 else (Fraction(near) > number):
        near = nextafter(near, towards)
    return int(near)


def written_texts(texts: Texts) -> dict[str, Any]:
    """The keywords of a schema of strings that says this, beside `type`."""
    schema: dict[str, Any] = {}
    if texts.constant is not None:
        schema["enum"] = [texts.constant]
    if texts.shortest:
        schema["minLength"] = texts.shortest
    if texts.longest is not None:
        schema["maxLength"] = texts.longest
    more = [{"format": name} for name in sorted(texts.formats)] + [{"pattern": each} for each in sorted(texts.patterns)]
    if more:
        schema |= more[0]
    if more[1:]:
        schema["allOf"] = [{"type": "string", **each} for each in more[1:]]
    return schema
