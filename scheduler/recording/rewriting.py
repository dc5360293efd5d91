"""Messages with some of their fields replaced, however deep these are. Pure."""

import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.scheduler.recording.snapshot import Rules


class Rewriter:
    """Replaces fields of structs, by class and name, in structs and tuples of them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._fields: dict[type, tuple[str, ...]] = {}

    def __call__(self, value: Any) -> Any:
        """The value with its fields replaced; itself where there are none."""
        kind = type(value)
        if kind is tuple:
            found = tuple([self(each) for each in value])
            return found if any(a is not b for a, b in zip(found, value, strict=True)) else value
        fields = self._fields.get(kind)
        if fields is None:
            fields = self._fields[kind] = self._concerned(kind, set())
        if not fields:
            return value
        rules, changes = self._rules.get(kind, {}), {}
        for name in fields:
            before = getattr(value, name)
            after = self(before) if name not in rules else rules[name](value)
            if after is not before:
                changes[name] = after
        return msgspec.structs.replace(value, **changes) if changes else value

    def _concerned(self, kind: type, above: set[type]) -> tuple[str, ...]:
        """Fields of a struct that have to be looked at: those with a rule, and those that may contain such."""
        if not issubclass(kind, msgspec.Struct) or kind in above:
            return ()
        rules = self._rules.get(kind, {})
        return tuple(
            name
            for name, hint in typing.get_type_hints(kind).items()
            if name in kind.__struct_fields__
            and (name in rules or any(self._concerned(each, {*above, kind}) for each in _structs(hint)))
        )


def _structs(hint: Any) -> Iterator[type]:
    """Structs that a value of this type may be, or contain."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for each in typing.get_args(hint):
        yield from _structs(each)
