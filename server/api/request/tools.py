"""Tools of a chat: the functions that are offered, which of them have to be called, and calls in messages."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import invalid, shown
from headrace.core.types.requests.constraint import Constraint
from headrace.server.api.request.schema import (
    ChatBody,
    ChatMessage,
    Function,
    ResponsesBody,
    ResponseTool,
    ResponseToolChoice,
    Tool,
    ToolCall,
    ToolChoice,
)
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.structure import SLICE, excess, limits
from headrace.text.tool_calls.call_form import MAX_FORCED_CALLS, CallForm, calls_grammar, opening_mark
from headrace.text.tool_calls.char_reader import MAX_NAME

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_ID_CHARS = 128
ARGUMENTS = limits(1 << 22)  # of the arguments of all calls in one body: they are JSON in its texts
ANY_ARGUMENTS = '{"type":"object"}'
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse(NamedTuple):
    """What a chat may call, and has to."""

    form: CallForm
    functions: Mapping[str, Function]
    """By name, in the order in which they are offered."""
    forced: tuple[str, ...]
    """Functions one of which has to be called; empty if the model decides."""
    named: bool
    """Whether tool_choice names the function: it is called once."""
    parallel: bool
    """Whether there may be several calls."""
    inner: str
    """Where an item of the body's tools has the function, for errors: ".function", or "" for itself."""


class Named(NamedTuple):
    """A tool_choice that names a function."""

    field: str
    """That has the name."""
    name: str


def tool_use(model: ServedModel, body: ChatBody) -> ToolUse | None:
    """None if the model is to call nothing. Raises HeadraceError (400) for tools that are wrong, for a tool_choice that
    does not fit, and for a model that cannot call tools."""
    given = body.tool_choice
    if isinstance(given, ToolChoice):
        _check_kind("tool_choice", given.type)
        choice: str | Named | None = Named("tool_choice.function.name", given.function.name)
    else:
        choice = given
    return _tool_use(model, offered_functions(body.tools or []), choice, body.parallel_tool_calls, ".function")


def response_tool_use(model: ServedModel, body: ResponsesBody) -> ToolUse | None:
    """The same of POST /v1/responses, where functions have no object of their own."""
    tools = [_plain_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    given = body.tool_choice
    if isinstance(given, ResponseToolChoice):
        _check_kind("tool_choice", given.type)
        choice: str | Named | None = Named("tool_choice.name", given.name or "")
    else:
        choice = given
    return _tool_use(model, offered_functions(tools, inner=""), choice, body.parallel_tool_calls, "")


def _plain_tool(tool: ResponseTool, place: str) -> Tool:
    _check_kind(place, tool.type)
    return Tool(Function(tool.name or "", tool.description, tool.parameters, tool.strict))


def _tool_use(
    model: ServedModel, functions: dict[str, Function], given: str | Named | None, parallel: bool | None, inner: str
) -> ToolUse | None:
    choice = "auto" if given is None else given
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        text = f"tool_choice is {shown(choice)!r}; it has to be none, auto, required or a function"
        raise invalid("tool_choice", text)
    if not functions:
        if choice not in ("none", "auto"):
            raise invalid("tool_choice", "tool_choice needs tools, and none are given")
        return None
    if choice == "none":
        return None
    check_tools_taken(model)
    form = model.call_form
    if form is None:
        text = "how this model writes tool calls is not known; start the server with --tool-parser"
        raise invalid("tools", text, code="no_tool_parser")
    named = isinstance(choice, Named)
    if isinstance(choice, Named):
        forced: tuple[str, ...] = (_chosen(choice, functions),)
    else:
        forced = tuple(functions) if choice == "required" else ()
    return ToolUse(form, functions, forced, named, parallel is not False, inner)


def check_tools_taken(model: ServedModel) -> None:
    """Raises HeadraceError (400) for a model whose chat template does not tell it of tools."""
    if not model.takes_tools:
        text = "this model's chat template has no tools; give the server one that has (--chat-template)"
        raise invalid("tools", text, code="no_tools")


def offered_functions(tools: Sequence[Tool], inner: str = ".function") -> dict[str, Function]:
    """By name. inner: see ToolUse. Raises HeadraceError (400) for too many, for names that are wrong or given twice,
    and for parameters that are no schema of an object."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} functions; at most {MAX_TOOLS} are allowed")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        place, function = f"tools[{index}]", tool.function
        _check_kind(place, tool.type)
        _check_name(f"{place}{inner}.name", function.name)
        if function.name in functions:
            raise invalid(f"{place}{inner}.name", f"tools has two functions with the name {function.name!r}")
        if (function.parameters or {}).get("type", "object") != "object":
            field = f"{place}{inner}.parameters"
            raise invalid(f"{field}.type", f'{field}.type has to be "object"')
        functions[function.name] = function
    return functions


def template_tools(functions: Mapping[str, Function]) -> list[dict[str, Any]]:
    """Functions as chat templates take them."""
    return [
        {
            "type": "function",
            "function": {
                name: value
                for name, value in msgspec.structs.asdict(function).items()
                if value is not None and name != "strict"
            },
        }
        for function in functions.values()
    ]


async def forced_calls(model: ServedModel, client: str, use: ToolUse | None) -> Constraint | None:
    """What a text has to match that is calls of forced functions. Raises HeadraceError (400) for parameters that cannot
    be kept to, naming them."""
    if use is None or not use.forced:
        return None
    schemas = await _kept_to(model, client, use, use.forced)
    most = MAX_FORCED_CALLS if use.parallel and not use.named else 1
    return Constraint("grammar", _grammar(model, use, schemas, most))


async def with_free_calls(
    model: ServedModel, client: str, use: ToolUse, answer: Constraint | None
) -> Constraint | None:
    """What a text has to match in which the model may call functions, where other text has to match `answer`, or where
    some functions are strict and a token tells calls from text; the others may get any object then. Raises
    HeadraceError (400) for an answer that is no JSON schema, and for parameters that cannot be kept to."""
    strict = [name for name, function in use.functions.items() if function.strict]
    most = MAX_FORCED_CALLS if use.parallel else 1
    if answer is not None:
        if answer.kind != "json" or not isinstance(msgspec.json.decode(answer.text), dict):
            text = "tools that the model may call go with a JSON schema of its text alone; send one of them"
            raise invalid("tools", text)
        schemas = await _kept_to(model, client, use, tuple(use.functions))
        grammar = _grammar(model, use, schemas, most, answer=answer.text)
    elif strict and model.tokenizer.added_id(opening_mark(use.form)) is not None:
        schemas = dict.fromkeys(use.functions, ANY_ARGUMENTS) | await _kept_to(model, client, use, strict)
        grammar = _grammar(model, use, schemas, most, within_text=True)
    else:
        return None
    constraint = Constraint("grammar", grammar)
    if problem := await model.grammars.problem(constraint, client=client):
        raise invalid("tools", f"tools cannot be used: {problem}", code="invalid_constraint")
    return constraint


def _grammar(
    model: ServedModel,
    use: ToolUse,
    schemas: Mapping[str, str],
    most: int,
    *,
    answer: str | None = None,
    within_text: bool = False,
) -> str:
    """See calls_grammar. Raises HeadraceError (400) for a schema that cannot be kept to in the model's form."""
    added_id = model.tokenizer.added_id
    try:
        return calls_grammar(use.form, schemas, added_id, most=most, answer=answer, within_text=within_text)
    except ValueError as error:
        text = f"tools cannot be kept to as this model writes calls: {error}"
        raise invalid("tools", text, code="invalid_constraint") from error


async def _kept_to(model: ServedModel, client: str, use: ToolUse, names: Sequence[str]) -> dict[str, str]:
    """JSON schemas of the arguments of these functions. Raises HeadraceError (400) for one that cannot be compiled."""
    places = {name: f"tools[{index}]{use.inner}.parameters" for index, name in enumerate(use.functions)}
    schemas: dict[str, str] = {}
    for name in names:
        parameters = use.functions[name].parameters
        try:
            schema = {"type": "object"} | (NO_PARAMETERS if parameters is None else parameters)
            schemas[name] = msgspec.json.encode(schema).decode()
        except RecursionError as error:
            raise invalid(places[name], f"{places[name]} is nested too deeply") from error
        if problem := await model.grammars.problem(Constraint("json", schemas[name]), client=client):
            text = f"{places[name]} cannot be kept to, which these tools ask for: {problem}"
            raise invalid(places[name], text, code="invalid_constraint")
    return schemas


async def check_arguments(calls: Iterable[str | None], field: str) -> None:
    """Raises HeadraceError (413) for arguments, in their order, that have too many parts to be decoded. They may be no
    JSON, which decoding says: whatever follows that is not decoded."""
    text = ",".join(filter(None, calls)).encode(errors="surrogatepass")
    if not text:
        return
    over = await asyncio.to_thread(excess, text, ARGUMENTS) if len(text) > SLICE else excess(text, ARGUMENTS)
    if over is not None:
        message = f"{field}: the arguments of tool calls have more than {over.most} {over.what}, which is the limit"
        raise invalid(field, message, code="body_too_large", status=413)


def template_calls(message: ChatMessage, place: str, form: CallForm | None) -> dict[str, Any]:
    """The calls of a message as chat templates take them. place: its name in errors. Raises HeadraceError (400)."""
    calls = message.tool_calls or []
    if not calls:
        return {}
    if message.role != "assistant":
        raise invalid(f"{place}.tool_calls", f"{place}.tool_calls is for messages of the assistant")
    if len(calls) > MAX_CALLS:
        raise invalid(f"{place}.tool_calls", f"{place}.tool_calls has {len(calls)}; at most {MAX_CALLS} are allowed")
    as_text = form is not None and form.text_arguments
    return {
        "tool_calls": [
            _template_call(call, f"{place}.tool_calls[{number}]", as_text) for number, call in enumerate(calls)
        ]
    }


def _template_call(call: ToolCall, place: str, as_text: bool) -> dict[str, Any]:
    _check_kind(place, call.type)
    arguments = checked_arguments(call, f"{place}.id", f"{place}.function")
    given = call.function.arguments or "{}" if as_text else arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": given}}


def checked_arguments(call: ToolCall, id_field: str, place: str) -> dict[str, Any]:
    """The arguments of a call. id_field, place: where the body has its id, and its name and arguments. Raises
    HeadraceError (400) for a wrong one of them."""
    _check_id(id_field, call.id)
    _check_name(f"{place}.name", call.function.name)
    try:
        return msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except NO_MESSAGE as error:
        raise invalid(f"{place}.arguments", f"{place}.arguments has to be a JSON object, as text") from error


def check_results(messages: Sequence[ChatMessage], field: str) -> None:
    """Raises HeadraceError (400) for a tool message that names no call of a message before it."""
    made: set[str] = set()
    for index, message in enumerate(messages):
        place = f"{field}[{index}].tool_call_id"
        if message.role != "tool":
            if message.tool_call_id is not None:
                raise invalid(place, f"{place} is for messages of role tool")
            made.update(call.id for call in message.tool_calls or ())
        elif message.tool_call_id is None:
            raise invalid(place, f"{place} is required: the call that this is the result of", code="missing_field")
        elif message.tool_call_id not in made:
            text = f"{place} is {shown(message.tool_call_id)!r}, which no message before it has in its tool_calls"
            raise invalid(place, text)


def _chosen(choice: Named, functions: Mapping[str, Function]) -> str:
    if choice.name not in functions:
        raise invalid(choice.field, f"{choice.field} is {shown(choice.name)!r}, which is not among the tools")
    return choice.name


def _check_kind(place: str, kind: str | None) -> None:
    if kind not in (None, "function"):
        text = f"{place}.type is {shown(str(kind))!r}; only function is supported"
        raise invalid(f"{place}.type", text, code="unsupported")


def _check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        text = f"{field} has to have 1 to {MAX_NAME} letters, digits, underscores, dots and dashes"
        raise invalid(field, text)


def _check_id(field: str, given: str) -> None:
    if not 1 <= len(given) <= MAX_ID_CHARS:
        raise invalid(field, f"{field} has {len(given)} characters; 1 to {MAX_ID_CHARS} are allowed")
