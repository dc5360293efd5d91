"""Fields of other servers' APIs that this one does not serve: refused, or accepted where they change no answer.

The structs of schema.py, conversation_schema.py and format_schema.py are the fields that are served; with those here
they are all that a body may have, and what docs/api.md is generated from. A refused field passes if its value asks for
nothing (null, false, an empty one, a default), as clients send that fill in all fields. tests/server/api/
test_clients_of_today.py has what clients send, and where that was read.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from headrace.server.api.request import conversation_schema, format_schema, schema


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
        "user metadata client_metadata safety_identifier service_tier prompt_cache_key prompt_cache_options "
        "prompt_cache_retention session_id vllm_xargs",
    )
)
_CACHE_HINTS = "cache_control prompt_cache_breakpoint"
_CACHES = tuple(_accepted("a hint to caches; what prompts begin with is cached anyway", _CACHE_HINTS))
_EARLIER_REASONING = tuple(
    _accepted(
        "reasoning of earlier answers is no part of a prompt",
        "reasoning reasoning_content reasoning_details thinking_blocks",
    )
)
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
    *_refused("adapters are not served", "lora_path"),
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
    *_refused("reasoning is not parsed", "thinking_token_budget"),
    *_refused("reasoning is not parsed", "reasoning_effort", "none"),
    *_refused("reasoning is not parsed", "reasoning", {"effort": "none"}),
    *_refused("how much is said is the model's to decide", "verbosity", "medium"),
    *_refused("prompts are not cut; send what fits", "truncate_prompt_tokens truncation_side truncation", "disabled"),
    *_refused("special tokens are left out, and spaced as the tokenizer does", "skip_special_tokens", True),
    *_refused("special tokens are left out, and spaced as the tokenizer does", "spaces_between_special_tokens", True),
    *_refused("text is sent as it comes", "stream_interval", 1),
    *_refused(
        "ids are in the response of POST /v1/prefill and POST /generate",
        "return_token_ids return_tokens_as_token_ids return_token_offsets return_prompt_text",
    ),
    *_refused("not served", "routed_experts_prompt_start ec_transfer_params"),
    *_accepted("the id of a response is made here; X-Request-Id is in the logs", "request_id"),
)
_CHAT_TEMPLATE = (
    *_refused("the model's own chat template is used", "chat_template chat_template_kwargs"),
    *_refused("the model's own chat template decides", "add_generation_prompt", True),
    *_refused("the model's own chat template decides", "continue_final_message add_special_tokens"),
    *_refused("reasoning is not parsed", "include_reasoning separate_reasoning stream_reasoning", True),
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
        _refused("text is continued at its end", "suffix"),
        _refused("POST /v1/chat/completions has them", "top_logprobs", 0),
        _refused("POST /v1/chat/completions has them", "tools functions"),
    ),
    schema.ChatBody: _table(
        _OPENAI,
        _CHAT_TEMPLATE,
        _FUNCTIONS,
        _STORE,
        _accepted("a hint that makes answers faster elsewhere", "prediction"),
        _refused("POST /v1/completions has it", "echo"),
    ),
    schema.ResponsesBody: _table(
        _OPENAI,
        _CHAT_TEMPLATE,
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
    schema.DetokenizeBody: {},
    schema.TokenizeBody: _table(
        _CHAT_TEMPLATE,
        _MODEL_INPUT,
        _refused("ask POST /detokenize", "return_token_strs"),
    ),
    format_schema.StructuredOutputs: _table(
        _refused("not served", "structural_tag whitespace_pattern"),
        _refused("not served", "disable_any_whitespace disable_additional_properties"),
        _accepted("there is one library", "disable_fallback"),
    ),
    format_schema.ResponseFormat: _table(_refused("not served", "structures triggers format")),
    format_schema.JsonSchemaFormat: _table(_FORMAT),
    format_schema.TextFormat: _table(_FORMAT),
    format_schema.TextOptions: _table(_refused("how much is said is the model's to decide", "verbosity", "medium")),
    schema.StreamOptions: _table(
        _refused("usage comes at the end", "continuous_usage_stats"),
        _accepted("nothing is padded", "include_obfuscation"),
    ),
    conversation_schema.ChatMessage: _table(
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
        _EARLIER_REASONING,
        _accepted("reasoning of earlier answers is no part of a prompt", "summary encrypted_content"),
        _CACHES,
        _accepted("comes back from responses of other servers", "refusal"),
        _accepted("comes back from responses", "id status annotations phase parsed_arguments created_by"),
        _refused("functions only, called by the model", "namespace async"),
        _refused("functions only, called by the model", "caller", {"type": "direct"}),
    ),
    conversation_schema.ToolCall: _table(
        _refused("calls of functions only", "custom"),
        _PROVIDERS,
        _CACHES,
        _accepted("comes back from streams", "index"),
    ),
    conversation_schema.CalledFunction: _table(_PROVIDERS, _accepted("comes back from responses", "parsed_arguments")),
    conversation_schema.Tool: _table(_refused("functions only", "custom"), _CACHES),
    conversation_schema.Function: _table(_refused("not served", "defer_loading"), _CACHES),
    conversation_schema.ToolChoice: _table(_refused("a function is chosen by its name", "allowed_tools custom")),
    conversation_schema.ChosenFunction: _table(
        _accepted("those of the tool with this name count", "description parameters strict")
    ),
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
    conversation_schema.Part: _table(
        _refused("text models only", "image_url input_audio video_url audio_url file image detail"),
        _CACHES,
        _accepted("comes back from responses", "annotations logprobs parsed"),
    ),
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
            "session_id conversation_id routing_key custom_labels no_logs log_metrics bootstrap_pair_key "
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
        _refused("adapters are not served", "lora_path lora_id"),
        _refused("code of clients is not run", "custom_logit_processor"),
        _refused("sessions are not kept; a prompt that begins like an earlier one is cached", "session_params"),
        _refused("send data_parallel_rank", "routed_dp_rank"),
        _refused("responses are not stored", "background"),
        _refused("reasoning is not parsed", "require_reasoning max_thinking_tokens"),
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
