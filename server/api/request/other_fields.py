"""Fields of other servers' APIs that this one does not serve: refused, or accepted where they change no answer.

The structs of schema.py are the fields that are served; with those here they are all that a body may have, and what
docs/api.md is generated from. A refused field passes if its value asks for
nothing (null, false, an empty one, a default), as clients send that fill in all fields. tests/server/api/
test_clients_of_today.py has what clients send, and where that was read.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from headrace.core.types.errors import HeadraceError, invalid, shown
from headrace.core.types.requests.resume import Resume
from headrace.server.api.request import schema

NEAR_CHARS = 64  # of an unknown field, to be compared with those that there are
NOTHING_BYTES = 512  # of a value that may ask for nothing
Kind = type[msgspec.Struct]


class OtherField(NamedTuple):
    """A field that is known and not served."""

    refused: bool
    """False: it is accepted, and changes no answer."""
    why: str
    """For people: why it is refused, or why it may be accepted."""
    neutral: tuple[object, ...] = ()
    """Further values of a refused field that ask for nothing."""
    neutral_items: tuple[str, ...] = ()
    """A list of these asks for nothing, either: there is none here of what they name."""


def _refused(why: str, names: str, *neutral: object) -> Iterator[tuple[str, OtherField]]:
    return ((name, OtherField(True, why, neutral)) for name in names.split())


def _accepted(why: str, names: str) -> Iterator[tuple[str, OtherField]]:
    return ((name, OtherField(False, why)) for name in names.split())


def _table(*rows: Iterable[tuple[str, OtherField]]) -> dict[str, OtherField]:
    return {name: field for row in rows for name, field in row}


_LABELS = tuple(
    _accepted(
        "a label of the client's",
        "user metadata client_metadata safety_identifier service_tier prompt_cache_options vllm_xargs",
    )
)
_SCORED_SESSIONS = tuple(_accepted("the KV of items is not kept", "prompt_cache_key session_id"))
_CACHE_HINTS = "cache_control prompt_cache_breakpoint"
_CACHES = tuple(_accepted("a hint to caches; what prompts begin with is cached anyway", _CACHE_HINTS))
_EARLIER_REASONING = tuple(_accepted("reasoning_content has the same", "reasoning_details thinking_blocks"))
_PROVIDERS = tuple(_accepted("comes back from responses of other servers", "provider_specific_fields extra_content"))
_MODEL_INPUT = tuple(
    _refused(
        "text models only",
        "mm_payload mm_processor_kwargs media_io_kwargs return_mm_kwargs prompt_embeds documents audio modalities "
        "image",
        ["text"],
    )
)
_CONSTRAINTS = (
    *_refused("send structured_outputs with json, regex, choice or grammar", "structural_tag"),
    *_refused("not served", "guided_whitespace_pattern"),
    *_accepted("there is one library", "guided_decoding_backend"),
)
# SGLang's on OpenAI's routes. Routers that parse bodies send many of them with their defaults.
_SGLANG = (
    *_refused("POST /generate and POST /v1/prefill have them", "return_hidden_states"),
    *_refused("name the adapter as model", "lora_path"),
    *_refused("code of clients is not run", "custom_logit_processor"),
    *_refused("sessions are not kept; a prompt that begins like an earlier one is cached", "session_params"),
    *_refused("not served", "stop_regex custom_params return_routed_experts"),
    *_accepted("a label of the client's or of a router", "custom_labels"),
    *_accepted("the id of a response is made here; X-Request-Id is in the logs", "rid"),
)
_FORMAT = (
    *_accepted("a label of the client's", "name description"),
    *_accepted("schemas are kept to, strict or not", "strict"),
)
_GENERATION = (
    *_refused("beam search is not served", "use_beam_search length_penalty", 1.0),
    *_refused(
        "not served", "bad_words allowed_token_ids logprob_token_ids repetition_detection watermarking moderation"
    ),
    *_refused("how long a model reasons is its own to decide", "thinking_token_budget"),
    *_refused("how much is said is the model's to decide", "verbosity", "medium"),
    *_refused("prompts are not cut; send what fits", "truncate_prompt_tokens truncation_side truncation", "disabled"),
    *_refused("special tokens are left out, and spaced as the tokenizer does", "skip_special_tokens", True),
    *_refused("special tokens are left out, and spaced as the tokenizer does", "spaces_between_special_tokens", True),
    *_refused("text is sent as it comes", "stream_interval", 1),
    *_refused(
        "token ids are numbers, in prompt_token_ids and token_ids",
        "return_tokens_as_token_ids return_token_offsets return_prompt_text",
    ),
    *_refused("not served", "routed_experts_prompt_start ec_transfer_params"),
    *_accepted("the id of a response is made here; X-Request-Id is in the logs", "request_id"),
)
_CHAT_TEMPLATE = (
    *_refused("the model's own chat template is used", "chat_template"),
    *_refused("the model's own chat template decides", "add_special_tokens"),
    *_accepted("reasoning is streamed as it comes", "stream_reasoning"),
)
_FUNCTIONS = (
    *_refused("send tools", "functions"),
    *_refused("send tool_choice", "function_call", "none", "auto"),
    *_refused("nothing is searched", "web_search_options"),
)
_STORE = tuple(_refused("responses are not stored", "store"))
# Of /v1/responses: parts of a response that it has only where tools of the server were called, or where it reasoned.
_NOTHING_TO_INCLUDE = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_POOLED_PAIRS = "queries documents text_1 text_2 data_1 data_2"
_OPENAI = (*_LABELS, *_MODEL_INPUT, *_CONSTRAINTS, *_GENERATION, *_SGLANG)

SAME_AS: Mapping[str, tuple[str, ...]] = {  # what unknown fields are called here, where their names are far apart
    "token_ids": ("prompt_token_ids", "tokens", "input_ids"),
    "input_ids": ("prompt_token_ids", "tokens"),
    "prompt_token_ids": ("input_ids", "prompt"),
    "text": ("prompt", "input"),
    "input": ("prompt", "messages"),
    "messages": ("input",),
    "max_new_tokens": ("max_tokens", "sampling_params"),
}

OTHER_FIELDS: Mapping[type[msgspec.Struct], Mapping[str, OtherField]] = {
    schema.CompletionBody: _table(
        _OPENAI,
        _refused("the tokenizer decides", "add_special_tokens", True),
        _refused("it is for messages", "reasoning_effort", "none"),
        _refused("it is for messages", "reasoning", {"effort": "none"}),
        _refused("text is continued at its end", "suffix"),
        _refused("POST /v1/chat/completions has them", "top_logprobs", 0),
        _refused("POST /v1/chat/completions has them", "tools functions"),
    ),
    schema.ChatBody: _table(
        _OPENAI,
        _CHAT_TEMPLATE,
        _FUNCTIONS,
        _STORE,
        _refused("send reasoning_effort", "reasoning", {"effort": "none"}),
        _accepted("a hint that makes answers faster elsewhere", "prediction"),
        _refused("POST /v1/completions has it", "echo"),
    ),
    schema.ResponsesBody: _table(
        _OPENAI,
        _CHAT_TEMPLATE,
        _refused("POST /v1/chat/completions has them", "chat_template_kwargs reasoning_effort continue_final_message"),
        _refused("POST /v1/chat/completions has it", "return_token_ids"),
        _refused("POST /v1/chat/completions has them", "add_generation_prompt", True),
        _refused("POST /v1/chat/completions has them", "include_reasoning separate_reasoning", True),
        _FUNCTIONS,
        _accepted("no tools are called here", "max_tool_calls"),
        _STORE,
        {
            "include": OtherField(
                True, "no logprobs in POST /v1/responses; of the rest there is none", (), _NOTHING_TO_INCLUDE
            )
        }.items(),
        _refused("not served", "prediction prompt context_management access_programs previous_input_messages"),
        _refused("not served", "enable_response_messages"),
        _refused("responses are not stored", "previous_response_id conversation background"),
        _refused("POST /v1/chat/completions has them", "logprobs top_logprobs", 0),
    ),
    schema.PrefillBody: _table(_CONSTRAINTS),
    schema.TokensBody: _table(
        _refused(
            "images are in the messages of POST /v1/chat/completions", "features content_parts ec_transfer_params"
        ),
        _accepted("places in a text that is not in the body", "token_offsets"),
        _accepted("constraints are used as they are given", "reasoning_parser_kwargs"),
    ),
    schema.TokenSampling: _table(
        _refused(
            "not served",
            "bad_words allowed_token_ids logprob_token_ids prompt_logprob_token_ids prompt_logprob_start "
            "repetition_detection trace_decode_token_ids watermarking",
        ),
        _refused("not served", "routed_experts_prompt_start", 0),
        _refused("how long a model reasons is its own to decide", "thinking_token_budget"),
        _refused("prompts are not cut; send what fits", "truncate_prompt_tokens"),
        _refused("cached prefixes are used", "skip_reading_prefix_cache"),
        _refused("special tokens are left out, and spaced as the tokenizer does", "skip_special_tokens", True),
        _refused(
            "special tokens are left out, and spaced as the tokenizer does", "spaces_between_special_tokens", True
        ),
        _refused("tokens are sent as they come", "stream_interval", 1),
        _accepted("output_mode and stream say it", "detokenize output_kind output_text_buffer_length"),
        _accepted("for vLLM's engine alone", "skip_clone flat_logprobs"),
    ),
    schema.ExtraArgs: _table(_refused("not served", "ec_transfer_params")),
    schema.ScoreBody: _table(
        _LABELS,
        _SCORED_SESSIONS,
        _refused("tokens have the model's own embeddings", "embed_override_token_id query_embed_overrides"),
        _refused("tokens have the model's own embeddings", "item_embed_overrides"),
        _refused("POST /v1/prefill has hidden_states", "return_pooled_hidden_states"),
        _refused("scores are read at the end of each item", "score_extraction_token"),
        _refused("it is of models that pool; send query, items and label_token_ids", _POOLED_PAIRS),
        _accepted("the id of a request is made here; X-Request-Id is in the logs", "rid"),
    ),
    schema.GenerativeScoringBody: _table(
        _LABELS,
        _SCORED_SESSIONS,
        _accepted("the id of a response is made here; X-Request-Id is in the logs", "request_id"),
    ),
    schema.RerankBody: _table(
        _LABELS,
        _SCORED_SESSIONS,
        _accepted("the id of a response is made here; X-Request-Id is in the logs", "request_id rid"),
        _refused(
            "documents are not cut; send what fits",
            "max_tokens_per_query max_tokens_per_doc max_chunks_per_doc truncate_prompt_tokens truncation_side",
            0,
        ),
        _refused("nothing is padded", "padding", "do_not_pad"),
        _refused("a score is a probability", "use_activation", True),
        _refused("documents are texts", "rank_fields mm_processor_kwargs"),
    ),
    schema.DetokenizeBody: {},
    schema.TokenizeBody: _table(
        _CHAT_TEMPLATE,
        _MODEL_INPUT,
        _refused("ask POST /detokenize", "return_token_strs"),
    ),
    schema.KvHintsBody: _table(_CHAT_TEMPLATE, _MODEL_INPUT),
    Resume: _table(),
    schema.StructuredOutputs: _table(
        _refused("not served", "structural_tag whitespace_pattern _backend _backend_was_auto"),
        _refused("not served", "disable_any_whitespace disable_additional_properties"),
        _accepted("there is one library", "disable_fallback"),
    ),
    schema.ResponseFormat: _table(_refused("not served", "structures triggers format")),
    schema.JsonSchemaFormat: _table(_FORMAT),
    schema.TextFormat: _table(_FORMAT),
    schema.ReasoningOptions: _table(
        _accepted("reasoning is given as it is", "summary generate_summary context"),
    ),
    schema.TextOptions: _table(_refused("how much is said is the model's to decide", "verbosity", "medium")),
    schema.StreamOptions: _table(
        _refused("usage comes at the end", "continuous_usage_stats"),
        _accepted("nothing is padded", "include_obfuscation"),
    ),
    schema.ChatMessage: _table(
        _refused("send tool_calls", "function_call"),
        _refused("text models only", "audio"),
        _EARLIER_REASONING,
        _PROVIDERS,
        _CACHES,
        _accepted("comes back from responses", "id annotations parsed"),
    ),
    schema.InputItem: _table(
        _refused("calls are items of their own", "tool_calls tool_call_id function_call"),
        _refused("text models only", "audio"),
        _accepted("the content of an item of reasoning has it", "reasoning reasoning_content"),
        _EARLIER_REASONING,
        _accepted("reasoning is part of a prompt as it is in content", "summary encrypted_content"),
        _CACHES,
        _accepted("comes back from responses of other servers", "refusal"),
        _accepted("comes back from responses", "id status annotations phase parsed_arguments created_by"),
        _refused("functions only, called by the model", "namespace async"),
        _refused("functions only, called by the model", "caller", {"type": "direct"}),
    ),
    schema.ToolCall: _table(
        _refused("calls of functions only", "custom"),
        _PROVIDERS,
        _CACHES,
        _accepted("comes back from streams", "index"),
    ),
    schema.CalledFunction: _table(_PROVIDERS, _accepted("comes back from responses", "parsed_arguments")),
    schema.Tool: _table(_refused("functions only", "custom"), _CACHES),
    schema.Function: _table(_refused("not served", "defer_loading"), _CACHES),
    schema.ToolChoice: _table(_refused("a function is chosen by its name", "allowed_tools custom")),
    schema.ChosenFunction: _table(_accepted("those of the tool with this name count", "description parameters strict")),
    schema.ResponseTool: _table(
        _refused(
            "functions only",
            "custom format vector_store_ids filters user_location search_context_size container server_label async",
        ),
        _refused("functions only", "allowed_callers", ["direct"]),
        _refused("not served", "defer_loading"),
        _accepted("what a function returns is not told to the model before", "output_schema"),
        _CACHES,
    ),
    schema.ResponseToolChoice: _table(_refused("a function is chosen by its name", "mode tools server_label")),
    schema.Part: _table(
        _refused("text and images only", "input_audio video_url audio_url file"),
        _refused("send image_url", "image file_id"),
        _accepted("the model's processor says how large images are", "detail"),
        _CACHES,
        _accepted("comes back from responses", "annotations logprobs parsed"),
    ),
    schema.OpenFields: _table(),
    schema.ImageUrl: _table(_accepted("the model's processor says how large images are", "detail")),
    schema.GenerateSampling: _table(
        _refused("not served", "stop_regex structural_tag custom_params"),
        _refused("special tokens are left out, and spaced as the tokenizer does", "skip_special_tokens", True),
        _refused(
            "special tokens are left out, and spaced as the tokenizer does", "spaces_between_special_tokens", True
        ),
        _refused("text is sent as it comes", "stream_interval", 1),
        _refused("beam search is not served", "beam_width", 1),
    ),
    schema.GenerateBody: _table(
        _accepted(
            "a label of the client's or of a router",
            "conversation_id routing_key custom_labels no_logs log_metrics bootstrap_pair_key "
            "decode_tp_size external_trace_header received_time http_worker_ipc kv_router_hint disagg_prefill_dp_rank",
        ),
        _refused(
            "text models only",
            "input_embeds image_data video_data audio_data mm_hashes mm_content_hashes use_audio_in_video video_config "
            "modalities positional_embed_overrides need_wait_for_mm_inputs num_items_assigned encoder_urls "
            "images_config max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch "
            "return_bytes",
        ),
        # Routers limit what a prefill server generates by these, though SGLang has no such fields.
        _refused("sampling_params has max_new_tokens and min_new_tokens", "max_tokens min_tokens", 1),
        _refused("name the adapter as model", "lora_path lora_id"),
        _refused("code of clients is not run", "custom_logit_processor"),
        _refused("sessions are not kept; a prompt that begins like an earlier one is cached", "session_params"),
        _refused("send data_parallel_rank", "routed_dp_rank"),
        _refused("responses are not stored", "background"),
        _refused("texts are not read for reasoning", "require_reasoning max_thinking_tokens"),
        _refused(
            "not served",
            "token_ids_logprob return_sampling_mask return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 "
            "return_routed_experts routed_experts_start_len return_indexer_topk return_entropy "
            "multi_item_delimiter_indices",
            0,
        ),
        _accepted("ids are in the response anyway", "return_prompt_token_ids return_text_in_logprobs"),
    ),
}


def without_other_fields(body: bytes | bytearray, kind: Kind) -> bytes:
    """The body with the fields of its struct alone. Raises HeadraceError (400) for an unknown field, with the nearest
    known one, and for one that is not served and asks for something."""
    return bytes(_cleaned(msgspec.Raw(body), kind, ""))


def _cleaned(raw: msgspec.Raw, kind: Kind, path: str) -> msgspec.Raw:
    try:
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return raw  # no object: decoding it says so
    served = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    others = other_fields(kind)
    kept: dict[str, msgspec.Raw] = {}
    for name, value in given.items():
        if name in served:
            kept[name] = _nested(value, served[name], _joined(path, name))
        elif name not in others:
            raise _unknown(name, path, (*served, *others))
        elif others[name].refused and not _asks_for_nothing(value, others[name]):
            text = f"{_joined(path, name)} is not supported ({others[name].why}); leave it out"
            raise invalid(_joined(path, name), text, code="unsupported")
    return msgspec.Raw(msgspec.json.encode(kept))


def _nested(raw: msgspec.Raw, annotation: Any, path: str) -> msgspec.Raw:
    """A value that is an object with fields, or a list of such, if its type says so."""
    objects, lists = _structs_in(annotation)
    text = bytes(raw).lstrip()
    if objects and text.startswith(b"{"):
        return _cleaned(raw, objects[0], path)
    if lists and text.startswith(b"["):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        parts = [_cleaned(item, lists[0], f"{path}[{index}]") for index, item in enumerate(items)]
        return msgspec.Raw(msgspec.json.encode(parts))
    return raw


def _structs_in(annotation: Any) -> tuple[list[Kind], list[Kind]]:
    """Structs that a type allows, and those that it allows in lists."""
    options = get_args(annotation) if not _is_list(annotation) else (annotation,)
    options = options or (annotation,)
    objects = [option for option in options if _is_strict(option)]
    lists = [item for option in options if _is_list(option) for item in get_args(option) if _is_strict(item)]
    return objects, lists


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list


def _is_strict(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) and annotation in OTHER_FIELDS


def other_fields(kind: Kind) -> Mapping[str, OtherField]:
    """Other fields of a struct and of those that it extends."""
    return {name: field for each in reversed(kind.__mro__) for name, field in OTHER_FIELDS.get(each, {}).items()}


def _asks_for_nothing(raw: msgspec.Raw, field: OtherField) -> bool:
    if len(bytes(raw)) > NOTHING_BYTES:
        return False
    value = msgspec.json.decode(raw)
    if isinstance(value, list) and all(item in field.neutral_items for item in value):
        return True
    return value is None or value is False or value in ("", {}) or _is_among(value, field.neutral)


def _is_among(value: object, neutral: tuple[object, ...]) -> bool:
    """1 is 1.0, but True is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _unknown(name: str, path: str, known: tuple[str, ...]) -> HeadraceError:
    near = [field for field in SAME_AS.get(name, ()) if field in known][:1]
    near = near or (difflib.get_close_matches(name, known, n=1) if len(name) <= NEAR_CHARS else [])
    hint = f"; did you mean {near[0]}?" if near else ""
    field = shown(name) or '""'
    return invalid(_joined(path, field), f"unknown field {field}{hint}", code="unknown_field")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
