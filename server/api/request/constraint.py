"""The constraint of a body, in whichever of the APIs' fields it is given: structured output."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import HeadraceError, invalid, shown
from headrace.core.types.requests.constraint import Constraint
from headrace.server.api.request.explain import refuse_repeated_keys
from headrace.server.api.request.schema import (
    GenerateSampling,
    OpenAIBody,
    ResponseFormat,
    ResponsesBody,
    SamplingBody,
    StructuredOutputs,
    TextFormat,
)
from headrace.server.frontend.served_model import ServedModel

MAX_CHOICES = 4096
MAX_CONSTRAINT_BYTES = 1 << 16
JSON_OBJECT = '{"type":"object"}'
INVALID_CONSTRAINT = "invalid_constraint"
Found = tuple[str, Constraint]  # the field that gives it


async def body_constraint(
    model: ServedModel, client: str, body: SamplingBody, calls: Constraint | None = None
) -> Constraint | None:
    """What the text of a request has to match; None if the body does not say. client: see client_of(). calls: what its
    tool_choice asks for. Raises HeadraceError: 400 for more than one, for one that cannot be compiled, and for values
    that contradict it; 429 if too many of this client wait to be compiled."""
    found = _shared(body)
    if calls is not None:
        found.append(("tool_choice", calls))
    if isinstance(body, OpenAIBody):
        found += _response_format("response_format", body.response_format)
        found += _found(
            ("json_schema", _schema, body.json_schema), ("regex", _regex, body.regex), ("ebnf", _grammar, body.ebnf)
        )
    if isinstance(body, ResponsesBody) and body.text is not None:
        found += _text_format("text.format", body.text.format)
    return await _checked(model, client, found, ignore_eos=bool(body.ignore_eos))


async def generate_constraint(model: ServedModel, client: str, given: GenerateSampling) -> Constraint | None:
    """The same of SGLang's sampling_params."""
    found = _found(
        ("sampling_params.json_schema", _schema, given.json_schema),
        ("sampling_params.regex", _regex, given.regex),
        ("sampling_params.ebnf", _grammar, given.ebnf),
    )
    return await _checked(
        model, client, found, ignore_eos=bool(given.ignore_eos), ignore_field="sampling_params.ignore_eos"
    )


async def _checked(
    model: ServedModel, client: str, found: list[Found], *, ignore_eos: bool, ignore_field: str = "ignore_eos"
) -> Constraint | None:
    if not found:
        return None
    if len(found) > 1:
        names = [field for field, _ in found]
        text = f"{', '.join(names[:-1])} and {names[-1]} are given together; send one constraint"
        raise invalid(names[-1], text)
    ((field, constraint),) = found
    if ignore_eos:
        raise invalid(ignore_field, f"{ignore_field} and {field} contradict each other; send one of them")
    if (size := len(constraint.text.encode(errors="surrogatepass"))) > MAX_CONSTRAINT_BYTES:
        raise _refused(field, f"it has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed")
    try:
        encoded = constraint.text.encode()
    except UnicodeEncodeError as error:
        raise _refused(field, f"it is no valid text: {error.reason}") from error
    if constraint.kind == "json":
        with suppress(*NO_MESSAGE):  # what is no JSON is refused below, like what is no schema
            msgspec.json.decode(encoded)
            refuse_repeated_keys(encoded, field)
    if problem := await model.grammars.problem(constraint, client=client):
        raise _refused(field, problem)
    return constraint


def _refused(field: str, why: str) -> HeadraceError:
    return invalid(field, f"{field} cannot be used: {why}", code=INVALID_CONSTRAINT)


def _found(*fields: tuple[str, Callable[[str, Any], Constraint], Any]) -> list[Found]:
    """The constraints of those fields that are given. fields: name, what makes a constraint of the value, the value."""
    return [(field, make(field, value)) for field, make, value in fields if value is not None]


def _shared(body: SamplingBody) -> list[Found]:
    """vLLM's fields: structured_outputs, and those of its earlier versions."""
    return _structured("structured_outputs", body.structured_outputs) + _found(
        ("guided_json", _schema, body.guided_json),
        ("guided_regex", _regex, body.guided_regex),
        ("guided_choice", _choice, body.guided_choice),
        ("guided_grammar", _grammar, body.guided_grammar),
    )


def _structured(name: str, given: StructuredOutputs | None) -> list[Found]:
    """Raises HeadraceError (400) for an object that has no constraint."""
    if given is None:
        return []
    found = _found(
        (f"{name}.json", _schema, given.json),
        (f"{name}.regex", _regex, given.regex),
        (f"{name}.choice", _choice, given.choice),
        (f"{name}.grammar", _grammar, given.grammar),
    )
    if given.json_object:
        found.append((f"{name}.json_object", Constraint("json", JSON_OBJECT)))
    if not found:
        raise invalid(name, f"{name} has no constraint; send one of json, regex, choice, grammar and json_object")
    return found


def _response_format(name: str, given: ResponseFormat | None) -> list[Found]:
    """OpenAI's field of chat completions, where the schema is in an object of its own."""
    if given is None or given == ResponseFormat():
        return []
    if given.type == "json_schema" and given.json_schema is None:
        raise invalid(f"{name}.json_schema", f"{name}.json_schema has to be an object with a schema")
    if given.type != "json_schema" and given.json_schema is not None:
        raise _unused(f"{name}.json_schema", name)
    schema = None if given.json_schema is None else given.json_schema.schema
    return _format(name, given.type, f"{name}.json_schema.schema", schema)


def _text_format(name: str, given: TextFormat | None) -> list[Found]:
    """OpenAI's field of responses."""
    if given is None or given == TextFormat():
        return []
    if given.type != "json_schema" and given.schema is not None:
        raise _unused(f"{name}.schema", name)
    return _format(name, given.type, f"{name}.schema", given.schema)


def _format(name: str, kind: str | None, field: str, schema: Any) -> list[Found]:
    """field: that of the schema."""
    if kind == "text":
        return []
    if kind == "json_object":
        return [(name, Constraint("json", JSON_OBJECT))]
    if kind != "json_schema":
        message = f"{name}.type is {shown(str(kind))!r}; supported are text, json_object and json_schema"
        raise invalid(f"{name}.type", message, code="unsupported")
    if schema is None:
        raise invalid(field, f"{field} is required", code="missing_field")
    return [(field, _schema(field, schema))]


def _unused(field: str, name: str) -> HeadraceError:
    return invalid(field, f"{field} is given, and {name}.type is not json_schema; send one of them")


def _schema(field: str, given: Any) -> Constraint:
    """A JSON schema, given as an object or as its text."""
    if isinstance(given, str):
        return Constraint("json", given)
    if not isinstance(given, dict | bool):
        raise invalid(field, f"{field} has to be a JSON schema: an object", code="invalid_type")
    try:
        return Constraint("json", msgspec.json.encode(given).decode())
    except RecursionError as error:
        raise _refused(field, "it is nested too deeply") from error


def _regex(_field: str, given: str) -> Constraint:
    return Constraint("regex", given)


def _grammar(_field: str, given: str) -> Constraint:
    return Constraint("grammar", given)


def _choice(field: str, given: list[str]) -> Constraint:
    if not 1 <= len(given) <= MAX_CHOICES:
        raise invalid(field, f"{field} has {len(given)} texts; 1 to {MAX_CHOICES} are allowed")
    if not all(given):
        raise invalid(f"{field}[{given.index('')}]", f"{field} has an empty text")
    return Constraint("choice", json.dumps(given))
