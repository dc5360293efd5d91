"""Parts of request bodies: messages of a conversation, and the tools that the model may call in it."""

from typing import Any

import msgspec


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """The text of a part of type refusal."""


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """function of a tool call."""

    name: str
    arguments: str | None = None
    """A JSON object, as text."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the assistant has made."""

    id: str
    function: CalledFunction
    type: str | None = None
    """function."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Of the assistant: calls that it has made."""
    tool_call_id: str | None = None
    """Of role tool: the call that this is the result of."""
    refusal: str | None = None
    """Of the assistant: what it has said in the place of content."""


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; None for a function without any."""
    strict: bool | None = None
    """Whether calls keep to the schema with tool_choice auto; with required ones they always do."""


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    function: Function
    type: str | None = None
    """function."""


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """function of a tool_choice."""

    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """A tool_choice that names a function."""

    function: ChosenFunction
    type: str | None = None
    """function."""
