"""Jinja's sandbox with limits on what rendering may take. Templates come with models: one that computes without end, or
makes texts without end, ends with an error, and holds neither the GIL nor memory meanwhile.

    time     processor time of the thread, looked at every few steps of loops, calls, filters and operators
    memory   characters and items of all that is made: written, joined, repeated, cut, returned by filters and methods
    calls    a size that follows from arguments (width, power, repetition, replacement, indentation) is known before the
             call; values that contain others, be it the same one many times over, are measured as they would be written

Filters and functions that take more than linear time by themselves, and that no chat template needs, are not there.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from types import BuiltinMethodType, FunctionType
from typing import Any, TypeVar

import jinja2
from jinja2 import Environment, nodes, pass_context
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

CPU_SECONDS = 5.0  # long conversations with many tools take some hundredths
STEPS = 8  # between two looks at the clock, which is a system call
MAX_CHARACTERS = 1 << 27  # of all texts and items made in one rendering
MAX_SIZE = 1 << 25  # characters of one text, or items of one list
MAX_BITS = 1 << 12  # of a whole number
MAX_WIDTH = 1 << 16  # a number that is a width or count of something
MAX_INDENT = 64
MAX_SOURCE = 1 << 18  # characters of a template; the longest known have 30,000
_WITHOUT_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")
_WITHOUT_METHODS = ("encode", "maketrans", "to_bytes", "translate")
_WIDTHS = ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "zfill")
# These filters hand on the items of a value, or look at a name of theirs; all others write, compare or order them.
_STRUCTURAL = (
    *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
    *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
)
_COMPARING = (
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "eq",
    "equalto",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lt",
    "ne",
)
_LAZY = (Iterator, range, KeysView, ValuesView, ItemsView)  # values whose items a filter or method may go over
_LONG_NUMBER = re.compile(r"\d{6,}")  # in a format

T = TypeVar("T")


class TemplateLimit(jinja2.TemplateError):
    """A template takes too much."""


class _Usage(threading.local):
    """What the rendering of this thread has used."""

    until = float("inf")
    characters = 0
    steps = 0


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template at a time in each thread."""

    intercepted_binops = frozenset(("//", "%", "+", "*", "-", "/", "**"))

    def __init__(self, **options: Any) -> None:
        """options: of jinja2.Environment."""
        super().__init__(finalize=self._finalized, **options)
        self._usage = _Usage()
        del self.globals["lipsum"]
        for name in _WITHOUT_FILTERS:
            del self.filters[name]
        self.limit_filters(self.filters)
        self.filters |= {"_steps": self._steps, "_joined": self._joined, "_made": self._made, "_whole": self._measured}
        for name in _COMPARING:
            self.tests[name] = self._comparing(self.tests[name])

    def limit_filters(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        """Add filters, with limits."""
        self.filters |= {name: self._limited(name, function) for name, function in filters.items()}

    def limited_template(self, source: str) -> jinja2.Template:
        """Compile a template. Raises jinja2.TemplateError for a source that cannot be compiled."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it has {len(source)} characters; at most {MAX_SOURCE} are compiled")
        try:
            code = self.compile(_Counting(self).visit(self.parse(source)))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            raise jinja2.TemplateError(f"it cannot be compiled: {error}") from error
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render_limited(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template within the limits. Raises TemplateLimit beyond them."""
        self._usage.characters = 0
        self._usage.until = time.thread_time() + CPU_SECONDS
        try:
            return template.render(variables)
        finally:
            self._usage.until = float("inf")

    # What Jinja calls.

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method of a template."""
        self = __self
        self._step()
        if isinstance(__obj, LoopContext):  # a recursive loop
            return super().call(__context, __obj, *(self._steps(each) for each in args), **kwargs)
        if not isinstance(__obj, Macro):
            args, kwargs = self._measured_arguments(args, kwargs)
            method = __obj.__wrapped__ if isinstance(__obj, FunctionType) and hasattr(__obj, "__wrapped__") else __obj
            if isinstance(method, BuiltinMethodType):
                self._check_operation(method.__name__, method.__self__, [*args, *kwargs.values()])
        return self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator."""
        self._step()
        match operator, left, right:
            case "%", str(), _:
                self._check_format(left, list(right) if isinstance(right, tuple) else [right])
            case "+", Sequence(), Sequence():
                _refuse_above(len(left) + len(right), MAX_SIZE, "characters or items")
            case ("*", Sequence() as repeated, int() as count) | ("*", int() as count, Sequence() as repeated):
                _refuse_above(len(repeated) * max(count, 0), MAX_SIZE, "characters or items")
            case "*", int(), int():
                _refuse_above(left.bit_length() + right.bit_length(), MAX_BITS, "bits of a number")
            case "**", int(), int():
                _refuse_above(left.bit_length() * abs(right), MAX_BITS, "bits of a number")
        return self._made(super().call_binop(context, operator, left, right))

    @pass_context
    def _finalized(self, context: Context, value: Any) -> str:
        """What is written for a value."""
        return self._made(value if isinstance(value, str) else str(self._measured(value)))

    # What the compiled templates call besides.

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _joined(self, values: Sequence[Any]) -> str:
        """The ~ operator."""
        texts = [value if isinstance(value, str) else str(self._measured(value)) for value in values]
        _refuse_above(sum(map(len, texts)), MAX_SIZE, "characters")
        return self._made("".join(texts))

    def _made(self, value: T) -> T:
        """Count a value that has been made."""
        if isinstance(value, (str, list, tuple, dict)):
            usage = self._usage
            usage.characters += len(value)
            if usage.characters > MAX_CHARACTERS:
                raise TemplateLimit(f"it makes more than {MAX_CHARACTERS} characters and items in all")
        return value

    def _measured(self, value: Any, indent: int = 0) -> Any:
        """Refuse a value that would be too long as a text. indent: characters before each item, for each level."""
        if isinstance(value, (list, tuple, dict)):
            self._size(value, indent)
        return value

    def _size(self, value: Any, indent: int = 0) -> int:
        """Characters of a value as a text, or items if there are more. Raises TemplateLimit above MAX_SIZE."""
        size, left = 0, [(value, 0)]
        while left:
            each, level = left.pop()
            if isinstance(each, (list, tuple)):
                left += ((item, level + 1) for item in each)
            elif isinstance(each, dict):
                left += ((item, level + 1) for pair in each.items() for item in pair)
            size += 1 + indent * level + (len(each) if isinstance(each, str) else 0)
            _refuse_above(size + len(left), MAX_SIZE, "characters or items")
            if not size & 0xFFF:
                self._step()
        return size

    def _step(self) -> None:
        usage = self._usage
        usage.steps += 1
        if not usage.steps % STEPS and time.thread_time() > usage.until:
            raise TemplateLimit(f"it takes more than {CPU_SECONDS:g} seconds")

    def _measured_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of which none is too long, iterators and views as lists."""
        whole = tuple(list(self._steps(each)) if isinstance(each, _LAZY) else each for each in args)
        for each in (*whole, *kwargs.values()):
            self._measured(each)
        return whole, kwargs

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with limits."""

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._step()
            own = [each for each in args if isinstance(each, (Context, EvalContext, Environment))]
            given: tuple[Any, ...] = args[len(own) :]
            if name not in _STRUCTURAL:
                given, kwargs = self._measured_arguments(given, kwargs)
            self._check_operation(name, given[0], [*given[1:], *kwargs.values()])
            if name == "tojson":
                self._check_json(given, kwargs)
            return self._made(function(*own, *given, **kwargs))

        return limited

    def _comparing(self, function: Any) -> Callable[..., Any]:
        """A test that compares values."""

        @functools.wraps(function)
        def compared(*args: Any) -> Any:
            return function(*map(self._measured, args))

        return compared

    def _check_operation(self, name: str, value: Any, others: Sequence[Any]) -> None:
        """Refuse a method or filter whose result would be too long. value: its first argument."""
        if name in _WITHOUT_METHODS:
            raise TemplateLimit(f"{name} is not available")
        if name in _WIDTHS:
            for number in others:
                if isinstance(number, int):
                    _refuse_above(abs(number), MAX_WIDTH, f"as a number given to {name}")
        match name, value, others:
            case "sum", _, [*_, list() | tuple() | str()]:
                raise TemplateLimit("sum is for numbers only")
            case "format", str(), _:
                self._check_format(value, others)
            case "format_map", str(), [Mapping() as named]:
                self._check_format(value, list(named.values()))
            case "replace", str(), [str() as old, str() as new, *_]:
                _refuse_above(len(value) + value.count(old) * len(new), MAX_SIZE, "characters")
            case "indent", str(), [width, *_]:
                _refuse_above((value.count("\n") + 1) * _length(width) + len(value), MAX_SIZE, "characters")
            case "expandtabs", str(), [int() as width, *_]:
                _refuse_above(value.count("\t") * width + len(value), MAX_SIZE, "characters")
            case "join", str(), [list() | tuple() as items]:  # the method
                _refuse_above(self._size(items) + len(value) * len(items), MAX_SIZE, "characters")
            case "join", list() | tuple() | dict(), [str() as separator, *_]:  # the filter
                _refuse_above(self._size(value) + len(separator) * len(value), MAX_SIZE, "characters")
            case "join", str(), [str() as separator, *_]:
                _refuse_above(len(value) * (1 + len(separator)), MAX_SIZE, "characters")

    def _check_format(self, text: str, values: Sequence[Any]) -> None:
        """Refuse a format with a text that is too long, or a width."""
        fields = text.count("%") + text.count("{")
        longest = max((self._size(value) for value in values), default=0)
        _refuse_above(len(text) + fields * (longest + 32), MAX_SIZE, "characters")
        if _LONG_NUMBER.search(text):
            raise TemplateLimit("it has a format with a number of more than five digits")
        if fields and ("*" in text or re.search(r":[^{}]*\{", text)):  # a width that is a value
            for number in values:
                _refuse_above(abs(number) if isinstance(number, int) else 0, MAX_WIDTH, "as a width")

    def _check_json(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse an indentation or separators that make a long text of a short one."""
        options = {**dict(zip(("value", "ensure_ascii", "indent", "separators"), args, strict=False)), **kwargs}
        indent = _length(options.get("indent"))
        _refuse_above(indent, MAX_INDENT, "as an indentation")
        for separator in options.get("separators") or ():
            _refuse_above(_length(separator), MAX_INDENT, "characters of a separator")
        self._measured(args[0], indent)


class _Counting(NodeTransformer):
    """Makes what Jinja compiles to plain Python, without a call, pass through the environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """{% for %}: each item is a step."""
        self.generic_visit(node)
        node.iter = self._through("_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """~"""
        self.generic_visit(node)
        return self._through("_joined", nodes.List(node.nodes, lineno=node.lineno, environment=self._environment))

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Text of the template itself, which may stand in a loop, is counted as any other."""
        self.generic_visit(node)
        node.nodes = [
            nodes.Const(each.data, lineno=each.lineno, environment=self._environment)
            if isinstance(each, nodes.TemplateData)
            else each
            for each in node.nodes
        ]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """==, in and others compare whole values."""
        self.generic_visit(node)
        node.expr = self._whole(node.expr)
        for operand in node.ops:
            operand.expr = self._whole(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A slice is a copy."""
        self.generic_visit(node)
        return self._through("_made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Tuples may be keys, whose hash is that of all that is in them."""
        self.generic_visit(node)
        return self._through("_whole", node) if node.ctx == "load" else node

    def _whole(self, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else self._through("_whole", node)

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self._environment)


def _length(value: Any) -> int:
    """Of an indentation: so many spaces, or a text."""
    return value if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _refuse_above(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise TemplateLimit(f"it takes more than {limit} {what}")
