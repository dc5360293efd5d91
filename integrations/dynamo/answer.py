"""Answers of POST /generate as chunks for Dynamo's frontend. Pure.

A chunk has the tokens that are new, with their logprobs; the last one of a choice has its finish reason and usage, and
a prefill worker's disaggregated_params besides, which the frontend hands to the decode worker as they are.
"""

from collections.abc import Mapping
from typing import Any

Answer = Mapping[str, Any]
Chunk = dict[str, Any]
_NEEDLESS = ("prompt_token_ids",)  # the decode worker gets the prompt from the frontend


def chunk(event: Answer) -> Chunk:
    """The chunk of one event of a stream with incremental_streaming_output, or of a whole answer."""
    meta = event["meta_info"]
    found: Chunk = {"token_ids": event["output_ids"], "index": 0, **_logprobs(meta)}
    if meta["finish_reason"] is not None:
        found["finish_reason"] = meta["finish_reason"]["type"]
        found["completion_usage"] = usage(meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
    return found


def prefill_chunk(answer: Answer) -> Chunk:
    """The chunk of a prefill worker: the first token, and where the KV is."""
    params = {name: value for name, value in answer["kv_transfer_params"].items() if name not in _NEEDLESS}
    handoff: Chunk = {"kv_transfer_params": params}
    if prompt := prompt_logprobs(answer["meta_info"]):
        handoff["prompt_logprobs"] = prompt
    return {**chunk(answer), "finish_reason": "length", "disaggregated_params": handoff}


def gateway_chunk(answer: Answer) -> Chunk:
    """The chunk for a gateway's answer, which has no token. Without kv_transfer_params the decode engine computes the
    prompt itself."""
    params, used = answer.get("kv_transfer_params"), answer["usage"]
    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "token_ids": [],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": usage(used["prompt_tokens"], 0, cached),
        "disaggregated_params": {} if params is None else {"kv_transfer_params": params},
    }


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Tokens, in OpenAI's form."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def prompt_logprobs(meta: Answer) -> list[dict[str, Any] | None]:
    """Logprobs of a prompt as the frontend reads them: a map from token id for each token; the first one has none."""
    found: list[dict[str, Any] | None] = []
    tokens = meta.get("input_token_logprobs") or []
    tops = meta.get("input_top_logprobs") or [None] * len(tokens)
    for (logprob, token, _), top in zip(tokens, tops, strict=True):
        if logprob is None:
            found.append(None)
        else:
            found.append({str(each): {"logprob": value} for value, each, _ in ((logprob, token, None), *(top or ()))})
    return found


def _logprobs(meta: Answer) -> Chunk:
    pairs = meta.get("output_token_logprobs")
    if not pairs:
        return {}
    found: Chunk = {"log_probs": [logprob for logprob, _, _ in pairs]}
    if tops := meta.get("output_top_logprobs"):
        found["top_logprobs"] = [[_top(rank, *each) for rank, each in enumerate(top or (), 1)] for top in tops]
    return found


def _top(rank: int, logprob: float, token: int, _text: str | None) -> dict[str, Any]:
    """One of the likeliest tokens of a position; the frontend has the texts."""
    return {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
