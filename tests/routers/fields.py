"""What routers make of served fields, where it is not what the decode server does by itself: a part of docs/api.md."""

LOST = {"prompt_logprobs": "dropped", "prompt_logprobs_start": "dropped"}  # the prefill server's response has them
NOT_OPEN = {"headrace": "refused with 400"}  # by the prefill server
CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema")
NOT_OF_DYNAMO = dict.fromkeys(
    ("prompt_logprobs_start", "priority", "slo_ttft_ms", "deadline_s", "data_parallel_rank", "extra_key",
     "structured_outputs", "no_stop_trim", "n", "json_schema", "regex", "ebnf", "kv_hints", "prompt_cache_retention",
     "session_id", "headrace"),
    "refused with 400",
)  # fmt: skip
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEHIND_ROUTERS: dict[tuple[str, str], dict[str, str]] = {
    ("vllm-nixl", COMPLETIONS): {**LOST, **NOT_OPEN, "json_schema": "refused with 422"},
    ("vllm-nixl", CHAT): NOT_OPEN,
    ("vllm-mooncake", COMPLETIONS): {**LOST, **NOT_OPEN, "json_schema": "refused with 422"},
    ("vllm-mooncake", CHAT): NOT_OPEN,
    ("vllm-mini-lb", COMPLETIONS): LOST,
    ("vllm-mini-lb", CHAT): LOST,
    ("sglang", COMPLETIONS): {**LOST, **NOT_OPEN, "json_schema": "refused with 422"},
    ("sglang", CHAT): {
        **LOST,
        **dict.fromkeys(
            (
                *CONSTRAINTS,
                "add_generation_prompt",
                "return_token_ids",
                "kv_hints",
                "prompt_cache_retention",
                "session_id",
                "headrace",
            ),
            "dropped",
        ),
    },
    ("sglang-mini-lb", COMPLETIONS): LOST,
    ("sglang-mini-lb", CHAT): LOST,
    ("xpyd", COMPLETIONS): {**LOST, "headrace": "refused with 502"},
    ("xpyd", CHAT): {**LOST, "headrace": "refused with 502"},
    ("dynamo", COMPLETIONS): {
        **dict.fromkeys(("prompt_logprobs", "echo"), "dropped"),
        **NOT_OF_DYNAMO,
        **dict.fromkeys(
            ("response_format", "best_of", "max_completion_tokens", "return_token_ids", "prompt_cache_key"),
            "refused with 400",
        ),
        "logprobs": "differs",  # in how tokens that are no text are written
    },
    ("dynamo", CHAT): {
        **dict.fromkeys(("prompt_logprobs", "parallel_tool_calls", "prompt_cache_key"), "dropped"),
        **NOT_OF_DYNAMO,
        **dict.fromkeys(
            ("continue_final_message", "include_reasoning", "separate_reasoning", "return_token_ids"),
            "refused with 400",
        ),
        **dict.fromkeys(("logprobs", "tools", "tool_choice"), "differs"),
    },
}
"""By name of the router in tests/routers/fleet.py, and route."""
REQUEST_ID, TRACE = "X-Request-Id", "traceparent"
PASSED_ON: dict[str, tuple[str, ...]] = {
    "vllm-nixl": (TRACE,),
    "vllm-mooncake": (TRACE,),
    "vllm-mini-lb": (),
    "sglang": (REQUEST_ID, TRACE),
    "sglang-mini-lb": (),
    "xpyd": (REQUEST_ID,),
    "dynamo": (REQUEST_ID, TRACE),
}
"""By name of the router, the ids of a client's request that come to both servers; others come to none: a part of
docs/routers.md."""
