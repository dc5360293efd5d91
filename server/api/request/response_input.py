"""The input of POST /v1/responses as a conversation."""

from collections.abc import Mapping

import msgspec

from headrace.core.types.errors import invalid, shown
from headrace.server.api.request.conversation_schema import CalledFunction, ChatMessage, ToolCall
from headrace.server.api.request.schema import InputItem, ResponsesBody
from headrace.server.api.request.tools import check_arguments, checked_arguments

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "name"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
_OPTIONAL = ("message", "reasoning")  # types of items whose fields may be left out


async def input_messages(body: ResponsesBody) -> tuple[list[ChatMessage], list[str]]:
    """The messages, and the item of the input that each begins with. Calls become a message of the assistant with
    tool_calls, results one of role tool; earlier reasoning is no part of a prompt. Raises HeadraceError (400) for other
    items, and for calls and results that are wrong."""
    if isinstance(body.input, str):
        return ([ChatMessage("user", body.input)], ["input"]) if body.input else ([], [])
    await check_arguments((item.arguments for item in body.input), "input")
    messages: list[ChatMessage] = []
    places: list[str] = []
    made: set[str] = set()
    for index, item in enumerate(body.input):
        place = f"input[{index}]"
        _check_fields(item, place)
        if item.type == "reasoning":
            continue
        if item.type == "function_call":
            call = ToolCall(item.call_id or "", CalledFunction(item.name or "", item.arguments))
            checked_arguments(call, f"{place}.call_id", place)
            made.add(call.id)
            if messages and messages[-1].role == "assistant":
                calls = [*(messages[-1].tool_calls or ()), call]
                messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
                continue
            messages.append(ChatMessage("assistant", tool_calls=[call]))
        elif item.type == "function_call_output":
            if item.call_id not in made:
                text = f"{place}.call_id is {shown(item.call_id or '')!r}, which no function_call before it has"
                raise invalid(f"{place}.call_id", text)
            messages.append(ChatMessage("tool", item.output, tool_call_id=item.call_id))
        else:
            messages.append(ChatMessage(item.role, item.content, item.name))
        places.append(place)
    return messages, places


def _check_fields(item: InputItem, place: str) -> None:
    """Raises HeadraceError (400) for an item of another type, and for fields that one of its type lacks or has not."""
    fields = _FIELDS.get(item.type)
    if fields is None:
        *most, last = _FIELDS
        text = f"{place} is of type {shown(item.type)!r}; it has to be {', '.join(most)} or {last}"
        raise invalid(place, text, code="unsupported")
    for name, given in msgspec.structs.asdict(item).items():
        if name != "type" and name not in fields and given:
            raise invalid(f"{place}.{name}", f"{place}.{name} is no field of an item of type {item.type}")
        if name in fields and given is None and item.type not in _OPTIONAL:
            raise invalid(f"{place}.{name}", f"{place}.{name} is required", code="missing_field")
