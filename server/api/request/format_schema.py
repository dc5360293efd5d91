"""Parts of request bodies: what the generated text has to match, by the names of OpenAI and vLLM."""

from typing import Any

import msgspec


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the generated text has to match: exactly one of these."""

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    """A regular expression that matches the whole text."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """In GBNF (llama.cpp's EBNF) or Lark."""
    json_object: bool | None = None
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """json_schema of a response_format."""

    schema: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's field of structured outputs."""

    type: str | None = None
    """text, json_object or json_schema."""
    json_schema: JsonSchemaFormat | None = None


class TextFormat(JsonSchemaFormat, kw_only=True, forbid_unknown_fields=True):
    """text.format of POST /v1/responses."""

    type: str | None = None
    """text, json_object or json_schema."""


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """text of POST /v1/responses."""

    format: TextFormat | None = None
