"""A request as Dynamo 1.6.1's frontend sends it to a worker: every option is there, most of them null."""

from typing import Any

STOP = ("stop", "stop_token_ids", "stop_token_ids_visible", "min_tokens", "ignore_eos", "max_thinking_tokens")
SAMPLING = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding",
)  # fmt: skip
OUTPUT = ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
PARAMS = {"do_remote_prefill": True, "ticket": "t", "tickets": ["t"], "remote_host": "10.0.0.1", "remote_port": 5}


def request(**changes: Any) -> dict[str, Any]:
    """changes: options by name, which are put into their groups; others are fields of the request."""
    made: dict[str, Any] = {
        "model": "tested",
        "token_ids": [5, 6, 7],
        "stop_conditions": {**dict.fromkeys(STOP), "max_tokens": 8, "stop_token_ids_hidden": [256]},
        "sampling_options": dict.fromkeys(SAMPLING),
        "output_options": dict.fromkeys(OUTPUT),
        "eos_token_ids": [256],
        "mdc_sum": "fe1904043ed9ee08eee9cfaed1c1dcc5a162f2b75e14f5a6bd4a2417ebda2cce",
        "annotations": [],
        "routing": {"prefill_worker_id": 12651694054375773097, "dp_rank": 0},
        "router_config_override": None,
    }
    for name, value in changes.items():
        group = next((made[each] for each, names in GROUPS.items() if name in names), made)
        group[name] = value
    return made


GROUPS = {
    "stop_conditions": (*STOP, "max_tokens", "stop_token_ids_hidden"),
    "sampling_options": (*SAMPLING, "allowed_token_ids", "bad_words_token_ids", "detokenize"),
    "output_options": OUTPUT,
}


def decoding(**changes: Any) -> dict[str, Any]:
    """A request for a decode worker."""
    return request(prefill_result={"disaggregated_params": {"kv_transfer_params": PARAMS}}, **changes)
