"""Requests of Dynamo's frontend as bodies of POST /generate. Pure.

The frontend's preprocessor (PreprocessedRequest in Dynamo) has applied the chat template, and tokenized. No field is
dropped: what has no counterpart, and would change the answer, is refused by its name.

    token_ids                                    the prompt
    sampling_options, stop_conditions            sampling_params
    output_options                               logprobs
    routing, extra_args.nvext                    priority, dp_rank, cache_salt
    agent_context                                session_id
    prefill_result.disaggregated_params          what the prefill worker said: kv_transfer_params
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.core.types.errors import HeadraceError, invalid

Fields = Mapping[str, Any]
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
"""kv_transfer_params that ask a prefill server to hold the KV."""
BYPASS = "x-bypass-remote-prefill"
"""Annotation of a prompt that the frontend leaves to the decode worker, under --router-conditional-disagg."""

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_STOP = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
}
_STOP_IDS = ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")
_OUTPUT = ("logprobs", "prompt_logprobs")
# The frontend makes texts of tokens, and does these itself.
_FRONTENDS_OWN = {
    "sampling_options": ("detokenize",),
    "stop_conditions": (),
    "output_options": ("skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"),
}
_CONSTRAINTS = ("json", "regex", "choice", "grammar")
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,  # the frontend ends the stream of all choices with the first one that has ended
    "best_of": lambda value: value == 1,
    "use_beam_search": lambda value: value is False,
    "length_penalty": lambda value: value == 1,
}
"""Values of options that are not served which ask for nothing."""
_MEDIA = ("prompt_embeds", "multi_modal_data", "encoder_result")


def generate_body(request: Fields, context_length: int) -> dict[str, Any]:
    """The body without a handoff. context_length: tokens of prompt and text together, by which the text is bounded that
    has no max_tokens. Raises HeadraceError (400)."""
    for name in _MEDIA:
        if request.get(name):
            raise _refused(name)
    ids = list(request["token_ids"])
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": _sampling(request, max(1, context_length - len(ids))),
        **_logprobs(_options(request, "output_options", _OUTPUT)),
        **_routing(request),
    }
    return body


def prefill_body(request: Fields, context_length: int) -> dict[str, Any]:
    """The body for a prefill server, which holds the KV. Raises HeadraceError (400)."""
    return {**generate_body(request, context_length), "kv_transfer_params": HOLD}


def decode_body(request: Fields, context_length: int) -> dict[str, Any]:
    """The body for a decode server, which fetches the KV where the prefill worker's answer says. A prompt without such
    an answer is the decode server's to place. Raises HeadraceError (400)."""
    body = {**generate_body(request, context_length), "stream": True, "incremental_streaming_output": True}
    body.pop("logprob_start_len", None)  # logprobs of the prompt are in the prefill worker's answer
    params = prefill_answer(request).get("kv_transfer_params")
    return body if params is None else {**body, "kv_transfer_params": params}


def gateway_body(request: Fields) -> dict[str, Any]:
    """The body of POST /v1/completions for a gateway, which has the KV computed and samples nothing. Raises
    HeadraceError (400)."""
    for name in _MEDIA:
        if request.get(name):
            raise _refused(name)
    sampling = request.get("sampling_options") or {}
    return {
        "prompt": list(request["token_ids"]),
        "max_tokens": 1,
        "n": sampling.get("n") or 1,
        "kv_transfer_params": HOLD,
        **{name: value for name, value in _routing(request).items() if name != "data_parallel_rank"},
    }


def prefill_answer(request: Fields) -> Fields:
    """The disaggregated_params of the prefill worker's answer; empty if the frontend asked none."""
    if BYPASS in (request.get("annotations") or ()):
        return {}
    return (request.get("prefill_result") or {}).get("disaggregated_params") or {}


def _sampling(request: Fields, room: int) -> dict[str, Any]:
    """sampling_params. room: tokens that fit behind the prompt."""
    stop = _options(request, "stop_conditions", (*_STOP, *_STOP_IDS))
    options = _options(request, "sampling_options", (*_SAMPLING, "guided_decoding"))
    found = {_SAMPLING[name]: value for name, value in options.items() if name in _SAMPLING}
    found |= {_STOP[name]: value for name, value in stop.items() if name in _STOP}
    found.setdefault("max_new_tokens", room)
    if ids := sorted({token for name in _STOP_IDS for token in stop.get(name, ())}):
        found["stop_token_ids"] = ids
    if constraint := options.get("guided_decoding"):
        if request.get("require_reasoning"):
            raise _refused("require_reasoning", "with sampling_options.guided_decoding it ")
        found |= _constraint(constraint)
    return found


def _options(request: Fields, group: str, served: Sequence[str]) -> dict[str, Any]:
    """The options of a group that are set. Raises HeadraceError (400) for one that is not served."""
    given = {name: value for name, value in (request.get(group) or {}).items() if value is not None}
    for name, value in given.items():
        if name in served or name in _FRONTENDS_OWN[group]:
            continue
        if not (name in _NEUTRAL and _NEUTRAL[name](value)):
            raise _refused(f"{group}.{name}")
    return {name: value for name, value in given.items() if name in served}


def _constraint(given: Fields) -> dict[str, Any]:
    """The constraint of guided_decoding under the name that POST /generate has for it."""
    found = {name: value for name, value in given.items() if value is not None and name != "backend"}
    if len(found) != 1 or (kind := next(iter(found))) not in _CONSTRAINTS:
        wrong = next((name for name in found if name not in _CONSTRAINTS), None)
        if wrong is not None:
            raise _refused(f"sampling_options.guided_decoding.{wrong}")
        field = "sampling_options.guided_decoding"
        raise invalid(field, f"{field} has {len(found)} constraints; one of {', '.join(_CONSTRAINTS)} is served")
    value = found[kind]
    match kind:
        case "json":
            return {"json_schema": value if isinstance(value, str) else json.dumps(value)}
        case "choice":
            return {"regex": "|".join(f"({re.escape(each)})" for each in value)}
        case "regex":
            return {"regex": value}
        case _:
            return {"ebnf": value}


def _logprobs(options: Fields) -> dict[str, Any]:
    wanted = [int(options[name]) for name in _OUTPUT if name in options]
    if not wanted:
        return {}
    start = {"logprob_start_len": 0} if "prompt_logprobs" in options else {}
    return {"return_logprob": True, "top_logprobs_num": max(wanted), **start}


def _routing(request: Fields) -> dict[str, Any]:
    """Where a prompt is computed, and when. Dynamo computes a higher priority first, Headrace a lower one."""
    routing = request.get("routing") or {}
    found: dict[str, Any] = {}
    if priority := routing.get("priority"):
        found["priority"] = -int(priority)
    if (rank := routing.get("dp_rank")) is not None:
        found["data_parallel_rank"] = int(rank)
    if salt := routing.get("cache_salt") or _extension(request).get("cache_salt"):
        found["cache_salt"] = salt
    if session := (request.get("agent_context") or {}).get("session_id"):
        found["session_id"] = session
    return found


def _extension(request: Fields) -> Fields:
    """nvext of the client's body, as far as the frontend passes it on."""
    return (request.get("extra_args") or {}).get("nvext") or {}


def _refused(field: str, what: str = "") -> HeadraceError:
    return invalid(field, f"{field}: {what or 'it '}is not served", code="unsupported")
