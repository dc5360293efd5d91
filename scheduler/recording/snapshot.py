"""Snapshots: a graph of objects as bytes, and back, without pickle. Pure.

    graph ── encode() ──► blocks of records, msgpack ── decode() ──► an equal graph

Each object that is no plain value is a record: [number, class, values …], a value being None, a boolean, a number, a
text, bytes, or [number] for another object, so that identity is kept and cycles are fine. Records of immutable objects
come after those of what they contain; mutable ones are made empty first and filled last. Neither way recurses over
mutable objects, so that a graph may be as deep as it likes.

What is read may come from anybody. Classes and functions are those of the scheduler and of core's messages and types,
found by name; attributes are set, and no constructor runs but those of msgspec structs and of builtin containers.
"""

import sys
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, lru_cache
from importlib import import_module
from itertools import chain, islice
from operator import attrgetter
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import msgspec

from headrace.core.types.packed import pack, unpack

BLOCK_RECORDS = 4096
MODULES = (
    "headrace.core.config", "headrace.core.incoming", "headrace.core.lazy_heap", "headrace.core.messages",
    "headrace.core.shares", "headrace.core.stats", "headrace.core.status", "headrace.core.trace", "headrace.core.types",
    "headrace.scheduler",
)  # fmt: skip
"""Packages and modules whose classes a snapshot may have."""

CODE = "headrace.scheduler"
"""The package whose functions and methods it may have."""

NOT_STATE = ("headrace.scheduler.loop", "headrace.scheduler.recording")

Rules = Mapping[type, Mapping[str, Callable[[Any], Any]]]
"""What is written in the place of an attribute, by class and name: a function of the object that has it."""

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_SAME = _PLAIN - {int}  # written as they are, whatever they are: most values
_READ = _PLAIN - {str}  # read as they are
_UNSET: list[int] = []  # of a slot without a value
_SIGNED, _UNSIGNED = -(1 << 63), 1 << 64  # integers that msgpack has
_DICTS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_EMPTY: dict[str, Callable[[], Any]] = {**_DICTS, "list": list, "set": set, "bytearray": bytearray}


class SnapshotError(Exception):
    """The graph has an object that no snapshot can have, or the bytes are no snapshot that this version reads."""


class _Shape(NamedTuple):
    """A class of records, in the table at the end of a snapshot."""

    kind: str
    """dict, ordered, counter, list, set, deque, bytearray, object (mutable); tuple, frozenset, array, range, integer,
    function, class, method, enum, named, struct."""

    name: str = ""
    """module:qualified.name of a class."""

    fields: tuple[str, ...] = ()
    """Attributes, in the order of the values."""


_MUTABLE = frozenset(("dict", "ordered", "counter", "list", "set", "deque", "bytearray", "object"))
_IMMUTABLE = (type, Enum, tuple, msgspec.Struct)  # and their subclasses
_BUILTIN: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    list: "list",
    set: "set",
    deque: "deque",
    bytearray: "bytearray",
    tuple: "tuple",
    frozenset: "frozenset",
    array: "array",
    range: "range",
    FunctionType: "function",
    MethodType: "method",
}
_SHAPES = {name: _Shape(name) for name in _BUILTIN.values()}


def encode(root: object, rules: Rules | None = None) -> Iterator[bytes]:
    """The blocks of a graph. rules: for values that are not to be written as they are. Raises SnapshotError for an
    object that a snapshot cannot have, naming it."""
    return _Encoder(rules or {}).blocks(root)


def decode(blocks: Iterable[bytes], texts: Mapping[str, str] | None = None) -> Any:
    """The graph of these blocks. texts: those that others are read in the place of. Raises SnapshotError when they are
    none, or have classes that are others here."""
    try:
        return _decode(blocks, texts or {})
    except SnapshotError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise SnapshotError(f"no snapshot, or a damaged one ({type(error).__name__}: {error})") from None


class _Encoder:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._numbers: dict[int, int] = {}  # by id(), so that all of them stay alive
        self._kept: list[object] = []
        self._shapes: dict[_Shape, int] = {}
        self._plans: dict[tuple[type, tuple[str, ...]], tuple[int, Callable[[Any], Iterable[Any]]]] = {}
        self._records: list[list[Any]] = []
        self._unfilled: list[tuple[int, object]] = []

    def blocks(self, root: object) -> Iterator[bytes]:
        top = self._value(root)
        while self._unfilled:
            number, each = self._unfilled.pop()
            self._records.append([number, *self._content(each)])
            if len(self._records) >= BLOCK_RECORDS:
                yield self._flush()
        yield self._flush()
        yield msgspec.msgpack.encode([list(self._shapes), len(self._numbers), top])

    def _flush(self) -> bytes:
        block = msgspec.msgpack.encode(self._records)
        self._records.clear()
        return block

    def _value(self, value: Any) -> Any:
        kind: type = type(value)
        if kind in _SAME or (kind is int and _SIGNED <= value < _UNSIGNED) or value is _UNSET:
            return value
        number = self._numbers.get(id(value))
        if number is not None:
            return [number]
        if kind is int:
            return [self._add(value, _Shape("integer"), [str(value)])]
        if _is_mutable(kind):
            number = self._number(value)
            self._unfilled.append((number, value))
            return [number]
        return [self._immutable(value, kind, _BUILTIN.get(kind))]

    def _number(self, value: object) -> int:
        number = self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return number

    def _add(self, value: object, shape: _Shape, values: list[Any]) -> int:
        number = self._number(value)
        self._records.append([number, self._shape(shape), *values])
        return number

    def _shape(self, shape: _Shape) -> int:
        return self._shapes.setdefault(shape, len(self._shapes))

    def _immutable(self, value: Any, kind: type, builtin: str | None) -> int:
        """Written at once, behind what it contains, which recurses as deep as immutable objects nest."""
        to_value = self._value
        if builtin in ("tuple", "frozenset"):
            return self._add(value, _SHAPES[builtin], self._values(value))
        if builtin == "function":
            return self._add(value, _Shape("function"), [_named(value, value.__qualname__, code=True)])
        if builtin == "method":
            owner = type(value.__self__)
            if getattr(owner, value.__name__, None) is not value.__func__:
                raise SnapshotError(f"{value!r} is a method that its class does not have under its name")
            _named(owner, owner.__qualname__, code=True)
            return self._add(value, _Shape("method"), [to_value(value.__self__), value.__name__])
        if builtin == "array":
            if value.typecode != "i":
                raise SnapshotError(f"an array of type {value.typecode!r}")
            return self._add(value, _Shape("array"), [pack(value)])
        if builtin == "range":
            return self._add(value, _Shape("range"), [value.start, value.stop, value.step])
        if issubclass(kind, type):
            return self._add(value, _Shape("class"), [_named(value, value.__qualname__)])
        if issubclass(kind, Enum):
            return self._add(value, _Shape("enum", _named(kind, kind.__qualname__)), [value.name])
        if issubclass(kind, tuple):
            fields = kind._fields  # type: ignore[attr-defined]
            shape = _Shape("named", _named(kind, kind.__qualname__), fields)
            return self._add(value, shape, self._values(value))
        number, values = self._attributes(value, kind, kind.__struct_fields__)  # type: ignore[attr-defined]
        found = self._number(value)
        self._records.append([found, number, *values])
        return found

    def _content(self, value: Any) -> list[Any]:
        """Class and values of a mutable object."""
        kind = type(value)
        builtin = _BUILTIN.get(kind)
        if builtin is None:
            number, values = self._attributes(value, kind, _fields(kind, value))
            return [number, *values]
        shape = self._shape(_SHAPES[builtin])
        if builtin in _DICTS:
            return [shape, *self._values(chain.from_iterable(value.items()))]
        if builtin == "bytearray":
            return [shape, bytes(value)]
        items = self._values(value)
        return [shape, value.maxlen, *items] if builtin == "deque" else [shape, *items]

    def _attributes(self, value: Any, kind: type, fields: tuple[str, ...]) -> tuple[int, list[Any]]:
        plan = self._plans.get((kind, fields))
        if plan is None:
            shape, read = _shape_of(kind, fields), _reader(fields)
            if rules := self._rules.get(kind):
                read = self._ruled(fields, rules)
            plan = self._plans[kind, fields] = self._shape(shape), read
        return plan[0], self._values(plan[1](value))

    def _ruled(self, fields: tuple[str, ...], rules: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], list[Any]]:
        """What reads the attributes of a class with rules."""
        each = [(name, rules.get(name)) for name in fields]

        def read(value: Any) -> list[Any]:
            found = [getattr(value, name, _UNSET) if rule is None else rule(value) for name, rule in each]
            self._kept.append(found)
            return found

        return read

    def _values(self, found: Iterable[Any]) -> list[Any]:
        to_value = self._value
        return [each if type(each) in _SAME else to_value(each) for each in found]


@cache
def _is_mutable(kind: type) -> bool:
    builtin = _BUILTIN.get(kind)
    return builtin in _MUTABLE or (builtin is None and not issubclass(kind, _IMMUTABLE))


@cache
def _shape_of(kind: type, fields: tuple[str, ...]) -> _Shape:
    what = "struct" if issubclass(kind, msgspec.Struct) else "object"
    return _Shape(what, _named(kind, kind.__qualname__), fields)


@cache
def _reader(fields: tuple[str, ...]) -> Callable[[Any], Iterable[Any]]:
    """What reads these attributes of an object."""
    if len(fields) < 2:
        return lambda value: [getattr(value, name, _UNSET) for name in fields]
    at_once: Callable[[Any], Iterable[Any]] = attrgetter(*fields)

    def read(value: Any) -> Iterable[Any]:
        try:
            return at_once(value)
        except AttributeError:  # a slot without a value
            return [getattr(value, name, _UNSET) for name in fields]

    return read


def _decode(blocks: Iterable[bytes], texts: Mapping[str, str]) -> Any:
    *bodies, end = blocks
    shapes, count, top = msgspec.msgpack.decode(end, type=tuple[list[_Shape], int, Any])
    records = [record for body in bodies for record in msgspec.msgpack.decode(body, type=list[list[Any]])]
    if len(records) != count:
        raise SnapshotError(f"{len(records)} objects, of {count}")
    objects: list[Any] = [_UNSET] * count
    mutable: list[tuple[list[Any], _Shape]] = []
    made: list[tuple[list[Any], _Shape]] = []
    for record in records:
        shape = shapes[record[1]]
        if shape.kind not in _MUTABLE:
            made.append((record, shape))
            continue
        objects[_free(objects, record[0])] = _empty(shape, record)
        mutable.append((record, shape))
    same = _READ if texts else _PLAIN

    def value(each: Any) -> Any:
        if type(each) is not list:
            return texts.get(each, each) if type(each) is str else each
        (number,) = each
        found = objects[number] if number >= 0 else _UNSET
        if found is _UNSET:
            raise SnapshotError("an object comes before what it contains")
        return found

    def values(record: list[Any], start: int = 2) -> list[Any]:
        return [each if type(each) in same else value(each) for each in islice(record, start, None)]

    def set_attributes(found: Any, shape: _Shape, record: list[Any]) -> None:
        setters = _setters(_class(shape.name), shape.fields)
        for (name, put), each in zip(setters, islice(record, 2, None), strict=True):
            if type(each) is list and not each:
                continue  # a slot without a value
            one = each if type(each) in same else value(each)
            if put is None:
                found.__dict__[name] = one
            else:
                put(found, one)

    for record, shape in made:
        objects[_free(objects, record[0])] = _make(shape, record, values)
    for record, shape in mutable:  # before containers, whose keys may be such objects
        if shape.kind == "object":
            set_attributes(objects[record[0]], shape, record)
    for record, shape in mutable:
        if shape.kind != "object" and len(record) > 2:
            _fill(objects[record[0]], shape.kind, record, values)
    return value(top)


def _free(objects: list[Any], number: int) -> int:
    if number < 0 or objects[number] is not _UNSET:
        raise SnapshotError("an object comes twice")
    return number


def _empty(shape: _Shape, record: list[Any]) -> Any:
    """A mutable object, to be filled."""
    if shape.kind == "object":
        return object.__new__(_class(shape.name))
    return deque(maxlen=record[2]) if shape.kind == "deque" else _EMPTY[shape.kind]()


def _make(shape: _Shape, record: list[Any], values: Callable[[list[Any]], list[Any]]) -> Any:
    """An immutable object."""
    match shape.kind:
        case "tuple":
            return tuple(values(record))
        case "frozenset":
            return frozenset(values(record))
        case "array":
            return unpack(record[2])
        case "range":
            return range(*record[2:])
        case "integer":
            return int(record[2])
        case "function":
            return _function(record[2])
        case "class":
            return _class(record[2])
        case "method":
            (owner,), name = values(record[:3]), record[3]
            function = getattr(_class(_named(type(owner), type(owner).__qualname__, code=True)), name)
            if not isinstance(function, FunctionType):
                raise SnapshotError(f"{name} is no method")
            return MethodType(function, owner)
        case "enum":
            return _class(shape.name).__members__[record[2]]  # type: ignore[attr-defined]
    kind = _class(shape.name)
    if shape.kind == "named" and issubclass(kind, tuple):
        _same_fields(kind, shape.fields, kind._fields)  # type: ignore[attr-defined]
        return tuple.__new__(kind, values(record))
    if shape.kind == "struct" and issubclass(kind, msgspec.Struct):
        _same_fields(kind, shape.fields, kind.__struct_fields__)
        return kind(**dict(zip(shape.fields, values(record), strict=True)))
    raise SnapshotError(f"no object is a {shape.kind!r}")


@lru_cache(1024)  # fields are as a file has them
def _setters(kind: type, fields: tuple[str, ...]) -> list[tuple[str, Callable[[Any, Any], None] | None]]:
    """Attributes, and what sets each; None for one of the object's dictionary."""
    slots, found = _slots(kind), []
    for name in fields:
        slot = slots.get(name)
        if slot is None and (not kind.__dictoffset__ or isinstance(getattr(kind, name, None), property)):
            raise _differs(kind)
        found.append((name, slot and slot.__set__))
    return found


def _fill(found: Any, kind: str, record: list[Any], values: Callable[..., list[Any]]) -> None:
    """Fill a container."""
    if kind in _DICTS:
        if len(record) % 2:
            raise SnapshotError("a key without a value")
        each = iter(values(record))
        for key, one in zip(each, each, strict=True):
            found[key] = one
    elif kind == "set":
        found.update(values(record))
    elif kind == "bytearray":
        found += record[2]
    elif kind == "deque":
        found.extend(values(record, 3))
    else:
        found.extend(values(record))


@cache
def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    found: dict[str, MemberDescriptorType] = {}
    for each in reversed(kind.__mro__):
        found.update({name: slot for name, slot in vars(each).items() if isinstance(slot, MemberDescriptorType)})
    return found


def _fields(kind: type, value: object) -> tuple[str, ...]:
    return (*_slots(kind), *getattr(value, "__dict__", ()))


def _named(found: Any, qualified: str, code: bool = False) -> str:
    """How a class or function is written. Raises SnapshotError for one that a snapshot may not have. code: one that is
    to be called."""
    module = found.__module__
    _resolve(module, qualified, found, code)
    return f"{module}:{qualified}"


@cache
def _resolve(module: str, qualified: str, found: Any, code: bool) -> None:
    if _find(f"{module}:{qualified}", code) is not found:
        raise SnapshotError(f"{qualified} of {module} is another object than the one of this name")


def _find(name: str, code: bool = False) -> Any:
    module, _, qualified = name.partition(":")
    packages = (CODE,) if code else MODULES
    if not any(module == each or module.startswith(f"{each}.") for each in packages) or module.startswith(NOT_STATE):
        raise SnapshotError(f"{name} is nothing that a snapshot may have")
    try:
        found: Any = sys.modules.get(module) or import_module(module)
        for part in qualified.split("."):
            found = vars(found)[part]
    except (ImportError, KeyError, TypeError):
        raise SnapshotError(f"{name} is nothing that a snapshot may have: it is not in this version") from None
    found = found.__func__ if isinstance(found, staticmethod) else found
    if getattr(found, "__module__", None) != module:
        raise SnapshotError(f"{name} is of another module")
    return found


@cache
def _class(name: str) -> type:
    found = _find(name)
    if not isinstance(found, type):
        raise SnapshotError(f"{name} is no class")
    return found


@cache
def _function(name: str) -> FunctionType:
    found = _find(name, code=True)
    if not isinstance(found, FunctionType):
        raise SnapshotError(f"{name} is no function")
    return found


def _same_fields(kind: type, fields: tuple[str, ...], own: tuple[str, ...]) -> None:
    if fields != own:
        raise _differs(kind)


def _differs(kind: type) -> SnapshotError:
    return SnapshotError(f"{kind.__qualname__} has other attributes in this version")
