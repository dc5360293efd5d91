"""Answers of servers as chunks for Dynamo's frontend."""

from typing import Any

from headrace.integrations.dynamo.answer import chunk, gateway_chunk, prefill_chunk, usage
from tests.integrations.dynamo.requests import PARAMS


def event(ids: list[int], reason: str | None = None, **meta: Any) -> dict[str, Any]:
    about = {
        "id": "gen-1",
        "finish_reason": None if reason is None else {"type": reason},
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 2,
        **meta,
    }
    return {"text": "", "output_ids": ids, "meta_info": about}


def test_tokens_and_the_end_of_a_text() -> None:
    assert chunk(event([7, 8])) == {"token_ids": [7, 8], "index": 0}
    last = chunk(event([], "stop", completion_tokens=5))
    assert (last["token_ids"], last["finish_reason"]) == ([], "stop")
    assert (
        last["completion_usage"]
        == usage(3, 5, 2)
        == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
    )


def test_logprobs_are_beside_their_tokens() -> None:
    pairs, tops = [[-0.5, 7, None], [-0.25, 8, None]], [[[-0.5, 7, None], [-1.5, 9, None]], None]
    found = chunk(event([7, 8], output_token_logprobs=pairs, output_top_logprobs=tops))
    assert found["log_probs"] == [-0.5, -0.25]
    first, second = found["top_logprobs"]
    assert [(each["rank"], each["token_id"], each["logprob"]) for each in first] == [(1, 7, -0.5), (2, 9, -1.5)]
    assert second == []
    assert "log_probs" not in chunk(event([], "length", output_token_logprobs=[]))


def test_what_a_prefill_worker_says() -> None:
    params = {**PARAMS, "prompt_token_ids": [5, 6, 7]}
    prompt = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    tops = [None, [[-0.5, 9, None], [-1.0, 6, None]], []]
    answer = event([8], "length", input_token_logprobs=prompt, input_top_logprobs=tops)
    found = prefill_chunk({**answer, "kv_transfer_params": params})
    assert (found["token_ids"], found["finish_reason"]) == ([8], "length")
    assert found["disaggregated_params"] == {
        "kv_transfer_params": PARAMS,  # the frontend has the prompt
        "prompt_logprobs": [None, {"6": {"logprob": -1.0}, "9": {"logprob": -0.5}}, {"7": {"logprob": -2.0}}],
    }
    assert found["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_what_a_gateway_says() -> None:
    """dynamo.vllm's decode worker reads prefill_result.disaggregated_params.kv_transfer_params, and computes the prompt
    where there are none."""
    used = {"prompt_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 1}}
    found = gateway_chunk({"kv_transfer_params": PARAMS, "usage": used})
    assert found["disaggregated_params"] == {"kv_transfer_params": PARAMS}
    assert (found["token_ids"], found["completion_usage"]) == ([], usage(3, 0, 1))
    assert gateway_chunk({"usage": used})["disaggregated_params"] == {}
