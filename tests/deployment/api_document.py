"""The tables of docs/api.md, made from the code: python -m tests.deployment.api_document writes them."""

import re
from collections.abc import Iterator

import msgspec

from headrace.core.types.requests.resume import Resume
from headrace.server.api.request import schema
from headrace.server.api.request.other_fields import OTHER_FIELDS, OtherField
from tests.deployment.files import ROOT
from tests.routers.fields import BEHIND_ROUTERS

DOCUMENT = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- made from the code: begin -->\n", "<!-- made from the code: end -->\n"
BODIES: dict[str, type[msgspec.Struct]] = {
    "POST /v1/completions": schema.CompletionBody,
    "POST /v1/chat/completions": schema.ChatBody,
    "POST /v1/responses": schema.ResponsesBody,
    "POST /generate": schema.GenerateBody,
    "POST /generate: `sampling_params`": schema.GenerateSampling,
    "POST /inference/v1/generate": schema.TokensBody,
    "POST /inference/v1/generate: `sampling_params`": schema.TokenSampling,
    "POST /inference/v1/generate: `sampling_params.extra_args`": schema.ExtraArgs,
    "POST /v1/prefill": schema.PrefillBody,
    "POST /v1/score": schema.ScoreBody,
    "POST /generative_scoring": schema.GenerativeScoringBody,
    "POST /v1/rerank, /v2/rerank, /rerank": schema.RerankBody,
    "POST /tokenize": schema.TokenizeBody,
    "POST /detokenize": schema.DetokenizeBody,
    "POST /v1/kv_hints": schema.KvHintsBody,
    "`structured_outputs`": schema.StructuredOutputs,
    "`resume` of POST /v1/prefill": Resume,
    "`response_format`": schema.ResponseFormat,
    "`response_format.json_schema`": schema.JsonSchemaFormat,
    "`reasoning` of POST /v1/responses": schema.ReasoningOptions,
    "`text` of POST /v1/responses": schema.TextOptions,
    "`text.format` of POST /v1/responses": schema.TextFormat,
    "`stream_options`": schema.StreamOptions,
    "`headrace`": schema.OpenFields,
    "items of `messages`": schema.ChatMessage,
    "items of `tool_calls`": schema.ToolCall,
    "`function` of a tool call": schema.CalledFunction,
    "items of `tools`": schema.Tool,
    "`function` of a tool": schema.Function,
    "`tool_choice` that names a function": schema.ToolChoice,
    "`function` of `tool_choice`": schema.ChosenFunction,
    "items of `input`": schema.InputItem,
    "items of `tools` of POST /v1/responses": schema.ResponseTool,
    "`tool_choice` of POST /v1/responses that names a function": schema.ResponseToolChoice,
    "parts of `content`": schema.Part,
    "`image_url` of a part": schema.ImageUrl,
}


def tables() -> str:
    """All tables, as Markdown."""
    sections = (line for title, kind in BODIES.items() for line in _section(title, kind))
    return "\n".join((*sections, *_behind_routers()))


def _behind_routers() -> Iterator[str]:
    yield "### Behind routers"
    yield ""
    yield "Served fields that do not come through (`make test-routers`); those that show in no text cannot be told."
    yield ""
    yield "| router | route | dropped by the router | refused by it |"
    yield "|---|---|---|---|"
    for (router, route), found in BEHIND_ROUTERS.items():
        dropped, refused = (
            ", ".join(f"`{name}`" for name, what in found.items() if what.startswith(kind)) or "none"
            for kind in ("dropped", "refused")
        )
        yield f"| {router} | `{route}` | {dropped} | {refused} |"
    yield ""


def written() -> str:
    """The document with these tables."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _section(title: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    required = [name for field in msgspec.structs.fields(kind) if field.required for name in [field.encode_name]]
    served = [f"**`{name}`**" if name in required else f"`{name}`" for name in sorted(kind.__struct_fields__)]
    yield f"Served: {', '.join(served)}."
    yield ""
    others = OTHER_FIELDS[kind]
    for refused, heading in ((False, "accepted, changes no answer"), (True, "refused")):
        rows = _by_reason({name: field for name, field in others.items() if field.refused is refused})
        if rows:
            yield f"| {heading} | why |"
            yield "|---|---|"
            yield from (
                f"| {', '.join(f'`{name}`' for name in sorted(names))} | {why} |" for why, names in rows.items()
            )
            yield ""


def _by_reason(fields: dict[str, OtherField]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for name, field in sorted(fields.items()):
        rows.setdefault(field.why, []).append(name)
    return rows


def documented() -> set[str]:
    """Every field that the document names."""
    return set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))


if __name__ == "__main__":
    DOCUMENT.write_text(written())
