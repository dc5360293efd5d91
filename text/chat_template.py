"""Chat templates of models, rendered as transformers renders them, which is the environment that they are written for.

Templates come with models, so they run in Jinja's sandbox, within limits. The tests compare with transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Name, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro

from headrace.text.template_limits import LimitedEnvironment

REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    NameError,  # Jinja compiles 1e400 to inf
    RecursionError,
    MemoryError,
)
"""What rendering raises for messages that a template does not take."""


RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables that are given by other means than by name."""
_END = "END_OF_THE_LAST_MESSAGE "  # what a message that is continued ends in, until it is rendered


class TemplateUse(NamedTuple):
    """What a request asks of a chat template beside its messages."""

    variables: Mapping[str, Any] = MappingProxyType({})
    """Further variables by name, such as enable_thinking."""
    opens: bool = True
    """The text goes on to where the assistant's answer begins."""
    continues: bool = False
    """It ends within the last message, which the answer continues."""


class ChatTemplate:
    """A model's Jinja template for conversations. tokens: special tokens by the names that templates use, such as
    bos_token."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        use: TemplateUse = TemplateUse(),  # noqa: B008 - immutable
    ) -> str:
        """The text of a conversation up to where the assistant's answer begins. tools: functions that it may call, as
        OpenAI's API has them.

        Raises jinja2.TemplateError, and what the template's own expressions raise for values that it does not expect:
        see REFUSALS. ValueError for a last message to be continued that has no text, or of which the template shows
        none.
        """
        shown = list(messages)
        if use.continues:
            if not shown or not shown[-1].get("content"):
                raise ValueError("the last message has no text to be continued")
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + _END}
        variables = {
            **use.variables,
            "messages": shown,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": use.opens and not use.continues,
            **self._tokens,
        }
        text = self._environment.render_limited(self._compiled, variables)
        return _up_to_end(text) if use.continues else text

    def common_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], use: TemplateUse
    ) -> str:
        """The beginning of a conversation's text that is the same with one message more, of whatever role the template
        takes; "" if it takes none."""
        plain = use._replace(opens=False, continues=False)
        texts = []
        for role in ("user", "assistant", "tool"):
            more = {"role": role, "content": "0"}
            try:
                texts.append(self.render([*messages, more], tools, plain))
            except REFUSALS:
                continue  # roles have to take turns, say
        if not texts:
            return ""
        texts.append(self.render(messages, tools, plain))
        first, last = min(texts), max(texts)  # what these two have in common, all of them have
        end = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
        return first[:end]

    def check(self) -> None:
        """Raises jinja2.TemplateError for a source that cannot be compiled."""
        assert self._compiled

    @cached_property
    def takes_tools(self) -> bool:
        """Whether it tells the model of tools. Raises jinja2.TemplateError."""
        return any(name.name == "tools" for name in self._environment.parse(self.source).find_all(Name))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.limited_template(self.source)

    @cached_property
    def _environment(self) -> LimitedEnvironment:
        environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.limit_filters({"tojson": _to_json})
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        return environment


def _up_to_end(text: str) -> str:
    """A text up to the end of its last message. Templates may strip messages: then the end is that of what is left."""
    at = text.rfind(_END.strip())
    if at < 0:
        raise ValueError("the template does not show the last message, which was to be continued")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


class _Generation(Extension):
    """The {% generation %} tag, which marks the assistant's text for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Macro) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The tojson filter. Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
