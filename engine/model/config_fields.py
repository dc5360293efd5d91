"""Reads typed values of a model's files: JSON objects such as config.json, and the metadata of GGUF files."""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from headrace.core.types.errors import ConfigError

T = TypeVar("T")
MAX_INT = (1 << 31) - 1
MAX_LAYERS = 10_000
MAX_NUMBER = 1e15  # a product of two is finite


class Kind(msgspec.Struct, Generic[T], frozen=True):
    """What a value has to be."""

    type: Any
    """Type and constraints, as msgspec.convert takes them; nothing is converted but a whole number to a float."""
    words: str
    """The same in an error message, after "has to be"."""


_Name = Annotated[str, Meta(pattern=r"^[\w.-]{1,100}\Z")]
_Count = Annotated[int, Meta(ge=0, le=MAX_INT)]

NAME: Kind[str] = Kind(_Name, "a name")
NAMES: Kind[list[str]] = Kind(list[_Name], "a list of names")
TEXTS: Kind[dict[str, str]] = Kind(dict[str, str], "an object whose values are texts")
OBJECT: Kind[dict[str, Any]] = Kind(dict[str, Any], "an object")
FLAG: Kind[bool] = Kind(bool, "true or false")
SIZE: Kind[int] = Kind(Annotated[int, Meta(ge=1, le=MAX_INT)], f"a whole number from 1 to {MAX_INT}")
COUNT: Kind[int] = Kind(_Count, f"a whole number from 0 to {MAX_INT}")
COUNTS: Kind[list[int]] = Kind(list[_Count], f"a list of whole numbers from 0 to {MAX_INT}")
SIZES: Kind[list[int]] = Kind(
    Annotated[list[Annotated[int, Meta(ge=1, le=MAX_INT)]], Meta(min_length=2, max_length=2)], "a list of two sizes"
)
LAYERS: Kind[int] = Kind(Annotated[int, Meta(ge=1, le=MAX_LAYERS)], f"a whole number from 1 to {MAX_LAYERS}")
TOKENS: Kind[int | list[int]] = Kind(_Count | list[_Count], "a token id or a list of token ids")
POSITIVE: Kind[float] = Kind(Annotated[float, Meta(gt=0, le=MAX_NUMBER)], f"a number above 0, at most {MAX_NUMBER:g}")
ABOVE_ONE: Kind[float] = Kind(Annotated[float, Meta(gt=1, le=MAX_NUMBER)], f"a number above 1, at most {MAX_NUMBER:g}")
NUMBER: Kind[float] = Kind(Annotated[float, Meta(ge=0, le=MAX_NUMBER)], f"a number from 0 to {MAX_NUMBER:g}")


class Fields:
    """Values of a mapping that was read from a file, checked as they are read. Null counts as missing."""

    def __init__(self, file: str, values: Mapping[str, Any], prefix: str = "") -> None:
        """file: name of the file, for error messages. prefix: before keys in error messages."""
        self._file = file
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it with null."""
        return key in self._values

    def get(self, key: str, kind: Kind[T], default: T | None = None, *, nullable: bool = True) -> T:
        """A value; the default where it is missing. nullable: or where it is null. Raises ConfigError for a value of
        another kind, and for a missing one without default."""
        value = self._values.get(key)
        if default is not None and (key not in self if not nullable else value is None):
            return default
        try:
            converted: T = msgspec.convert(value, kind.type)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # JSON may have lone surrogates
            got = f"got {_shown(value)}" if key in self else "but is missing"
            raise ConfigError(f"{self._file}: {self._prefix + key!r} has to be {kind.words}, {got}") from error
        return converted

    def optional(self, key: str, kind: Kind[T]) -> T | None:
        """A value; None where it is missing. Raises ConfigError for a value of another kind."""
        return None if self._values.get(key) is None else self.get(key, kind)

    def within(self, key: str) -> "Fields":
        """Values of an object; of an empty one where it is missing. Raises ConfigError for another kind of value."""
        values = self.get(key, OBJECT, {})
        return Fields(self._file, values, f"{self._prefix}{key}.")


def _shown(value: object) -> str:
    """A value as JSON has it, cut to some dozens of characters; of lists and objects the beginning."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return reprlib.repr(value)
