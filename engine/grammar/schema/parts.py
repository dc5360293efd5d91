"""What a JSON schema says of the values of each type, and how two schemas are joined into one that says both. Pure."""

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Literal, NamedTuple

Type = Literal["null", "boolean", "integer", "number", "string", "array", "object"]
TYPES: tuple[Type, ...] = ("null", "boolean", "integer", "number", "string", "array", "object")
ANYTHING = frozenset(TYPES) - {"integer"}


class SchemaError(Exception):
    """A schema that is wrong, that no value satisfies, or that cannot be kept to; the message says why and where."""

    def __init__(self, why: str, path: str = "#") -> None:
        super().__init__(why if path == "#" else f"{why} (at {path})")


def join_types(one: frozenset[Type], other: frozenset[Type]) -> frozenset[Type]:
    """The types that are in both; "number" has "integer" in it."""
    both = one & other
    if ("integer" in one and "number" in other) or ("number" in one and "integer" in other):
        both |= {"integer"}
    return both


class Bound(NamedTuple):
    """Numbers: from low to high, without these where they are open, and multiples of step."""

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    step: Fraction | None = None

    def above(self, low: Fraction | None, open_: bool) -> "Bound":
        """Also above low."""
        if low is None or (self.low is not None and (self.low, self.low_open) >= (low, open_)):
            return self
        return self._replace(low=low, low_open=open_)

    def below(self, high: Fraction | None, open_: bool) -> "Bound":
        """Also below high."""
        if high is None or (self.high is not None and (self.high, not self.high_open) <= (high, not open_)):
            return self
        return self._replace(high=high, high_open=open_)

    def steps(self, step: Fraction | None) -> "Bound":
        """Also multiples of step."""
        if step is None or self.step is None:
            return self._replace(step=step or self.step)
        one, other = self.step, step
        shared = one.denominator * other.denominator
        least = lcm(one.numerator * other.denominator, other.numerator * one.denominator)
        return self._replace(step=Fraction(least, shared))

    def joined(self, other: "Bound") -> "Bound":
        """What both say."""
        bound = self.above(other.low, other.low_open).below(other.high, other.high_open)
        return bound.steps(other.step)

    def problem(self) -> str:
        """Why no number is in it; "" if one is."""
        if (why := self._crossed()) or self.step is None or self.low is None or self.high is None:
            return why
        first = ceil(self.low / self.step) * self.step
        if first == self.low and self.low_open:
            first += self.step
        if first < self.high or (first == self.high and not self.high_open):
            return ""
        what = "integer" if self.step == 1 else f"multiple of {_written(self.step)}"
        return f"there is no {what} from {_written(self.low)} to {_written(self.high)}"

    def _crossed(self) -> str:
        if self.low is None or self.high is None:
            return ""
        if self.low > self.high:
            return f"minimum {_written(self.low)} is above maximum {_written(self.high)}"
        if self.low == self.high and (self.low_open or self.high_open):
            return f"no number is above {_written(self.low)} and below {_written(self.high)}, one of which is exclusive"
        return ""

    def integers(self) -> "Bound":
        """The integers in it, with bounds that are integers and belong to it."""
        bound = self.steps(Fraction(1))
        low, high = bound.low, bound.high
        if low is not None:
            low = Fraction(floor(low) + 1 if bound.low_open else ceil(low))
        if high is not None:
            high = Fraction(ceil(high) - 1 if bound.high_open else floor(high))
        return Bound(low, False, high, False, bound.step)


class Number(NamedTuple):
    """A number; an integer has bounds that are integers, and belong to it."""

    bound: Bound
    integer: bool


class Texts(NamedTuple):
    """Strings: of so many characters, in which each pattern is found, of each format."""

    shortest: int = 0
    longest: int | None = None
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    constant: str | None = None

    def joined(self, other: "Texts") -> "Texts | None":
        """What both say; None if they are two different texts."""
        if self.constant is not None and other.constant is not None and self.constant != other.constant:
            return None
        return Texts(
            max(self.shortest, other.shortest),
            least(self.longest, other.longest),
            self.patterns | other.patterns,
            self.formats | other.formats,
            self.constant if self.constant is not None else other.constant,
        )

    def problem(self) -> str:
        """Why no text is in it; "" if its lengths allow one."""
        if self.longest is not None and self.shortest > self.longest:
            return f"minLength {self.shortest} is above maxLength {self.longest}"
        if self.constant is not None:
            long = len(self.constant)
            if long < self.shortest or (self.longest is not None and long > self.longest):
                return f"the text {self.constant[:40]!r} does not have the length that is asked for"
        return ""


class Lists(NamedTuple):
    """Arrays: schemas of the first items, and of those that come after them."""

    first: tuple[int, ...] = ()
    rest: int | None = None
    shortest: int = 0
    longest: int | None = None


class Objects(NamedTuple):
    """Objects: schemas of properties by their names, by patterns in their names, and of all others."""

    properties: Mapping[str, int] = {}
    patterns: Mapping[str, int] = {}
    additional: int | None = None
    required: tuple[str, ...] = ()
    fewest: int = 0
    most: int | None = None


class Own(NamedTuple):
    """What a schema says by itself of the values of each type."""

    types: frozenset[Type] = ANYTHING
    bound: Bound = Bound()
    texts: Texts = Texts()
    lists: Lists = Lists()
    objects: Objects = Objects()
    truth: bool | None = None
    """Of booleans."""


def least(one: int | None, other: int | None) -> int | None:
    """The lower of two limits, which may be missing."""
    return other if one is None else one if other is None else min(one, other)


def decimal(number: Fraction) -> tuple[int, int]:
    """A number of a schema as (coefficient, decimal places)."""
    places = 0
    while (number * 10**places).denominator != 1:
        places += 1
    return int(number * 10**places), places


def _written(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number):g}"
