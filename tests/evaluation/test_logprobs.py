"""Every logprob that a pair gives, on every route, beside that of transformers with the same weights."""

from typing import Any

import pytest
import torch

from tests.e2e.harness import Server
from tests.engine.models import smollm2, transformers_tokenizer

pytestmark = pytest.mark.evaluation

Pair = tuple[Server, Server]
PAGE, CHUNK = 16, 64
CLOSE = 1e-3  # float32, in another order
PROMPT = (
    "In the evening they counted the boats. Nine had gone out in the morning, and nine were there again, though the "
    "wind had turned twice and nobody had slept. The oldest of the men said that it had been an easy day. Nobody "
    "answered him. They ate, and put out the lamps, and in the dark one of the boys began to laugh, "
    "because he had thought of something that the others did not know, and would not have believed."
)
SAMPLED = {"max_tokens": 6, "temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def tokens() -> Any:
    return transformers_tokenizer("smollm2")


def logprobs_of(ids: list[int]) -> torch.Tensor:
    """Of the token after each position: [positions, vocabulary]."""
    with torch.inference_mode():
        return torch.log_softmax(smollm2()(torch.tensor([ids])).logits[0].float(), -1)


def asked(decode: Server, path: str, body: dict[str, Any]) -> Any:
    response = decode.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def check(entries: list[tuple[int, float, list[float]]], prompt: list[int]) -> None:
    """Generated tokens with their logprobs, and the logprobs of their alternatives."""
    ids = [*prompt, *(token for token, _, _ in entries)]
    rows = logprobs_of(ids)[len(prompt) - 1 :]
    for row, (token, logprob, tops) in zip(rows[:-1], entries, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=CLOSE)
        assert tops == pytest.approx(row.topk(len(tops)).values.tolist(), abs=CLOSE)


def test_a_prompt_from_every_kind_of_position(servers: Pair, tokens: Any) -> None:
    """At edges of pages and chunks; what is before comes from the prefix cache of the prefill server."""
    prefill, decode = servers
    ids = tokens.encode(PROMPT)
    assert len(ids) > CHUNK + PAGE
    rows = logprobs_of(ids)
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 2}
    for start in (0, 1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, len(ids) - 1, len(ids)):
        before = prefill.total("headrace_cached_tokens_total")
        (choice,) = asked(decode, "/v1/completions", {**body, "prompt_logprobs_start": start})["choices"]
        cached = prefill.total("headrace_cached_tokens_total") - before
        assert cached == max(0, start - 1) // PAGE * PAGE
        found = choice["logprobs"]["token_logprobs"]
        first = max(1, start)
        assert found[:first] == [None] * min(first, len(ids))
        assert found[first:] == pytest.approx(
            [float(rows[at - 1, ids[at]]) for at in range(first, len(ids))], abs=CLOSE
        )
        for at in range(first, len(ids)):
            best = sorted(choice["logprobs"]["top_logprobs"][at].values(), reverse=True)[:2]
            assert best == pytest.approx(rows[at - 1].topk(2).values.tolist(), abs=CLOSE)


def test_completions_with_several_choices(servers: Pair, tokens: Any) -> None:
    """Each choice is another text, with logprobs of its own; with a seed the first is that of one choice alone."""
    ids = tokens.encode("Once upon a time")
    body = {"prompt": ids, "logprobs": 3, "n": 3, "ignore_eos": True, **SAMPLED}
    answer = asked(servers[1], "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(ids), "completion_tokens": 18}
    for choice in answer["choices"]:
        values = choice["logprobs"]
        generated = [tokens.encode(name, add_special_tokens=False) for name in values["tokens"]]
        assert all(len(each) == 1 for each in generated)
        tops = [sorted(each.values(), reverse=True)[:3] for each in values["top_logprobs"]]
        check(list(zip((each[0] for each in generated), values["token_logprobs"], tops, strict=True)), ids)
    alone = asked(servers[1], "/v1/completions", {**body, "n": 1})["choices"][0]
    assert alone["text"] == answer["choices"][0]["text"]


def test_chat(servers: Pair, tokens: Any) -> None:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "n": 2, **SAMPLED}
    ids = tokens.encode(tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
                        add_special_tokens=False)  # fmt: skip
    for choice in asked(servers[1], "/v1/chat/completions", body)["choices"]:
        entries = [
            (
                tokens.encode(entry["token"], add_special_tokens=False)[0],
                entry["logprob"],
                [top["logprob"] for top in entry["top_logprobs"]],
            )
            for entry in choice["logprobs"]["content"]
        ]
        check(entries, ids)


def test_generate(servers: Pair, tokens: Any) -> None:
    ids = tokens.encode(PROMPT)[:40]
    sampling = {"max_new_tokens": 6, "temperature": 0.8, "sampling_seed": 11, "n": 2}
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 9, "top_logprobs_num": 2}
    rows = logprobs_of(ids)
    for one in asked(servers[1], "/generate", {**body, "sampling_params": sampling}):
        about = one["meta_info"]
        assert [token for _, token, _ in about["input_token_logprobs"]] == ids[9:]
        assert about["input_token_logprobs"][0][0] is None
        expected = [float(rows[at - 1, ids[at]]) for at in range(10, 40)]
        assert [logprob for logprob, _, _ in about["input_token_logprobs"][1:]] == pytest.approx(expected, abs=CLOSE)
        tops = [[logprob for logprob, _, _ in each] for each in about["output_top_logprobs"]]
        pairs = [(token, logprob) for logprob, token, _ in about["output_token_logprobs"]]
        check([(*entry, top) for entry, top in zip(pairs, tops, strict=True)], ids)


def test_the_first_token_of_a_prefill(servers: Pair, tokens: Any) -> None:
    ids = tokens.encode(PROMPT)[:30]
    body = {
        "prompt_token_ids": ids,
        "handoff": "none",
        "logprobs": 2,
        "prompt_logprobs": 0,
        "prompt_logprobs_start": 20,
    }
    answer = asked(servers[0], "/v1/prefill", body)
    first = answer["first_token"]
    check([(first["id"], first["logprob"], [top["logprob"] for top in first["top_logprobs"]])], ids)
    assert answer["prompt_logprobs"][:20] == [None] * 20
    expected = [float(logprobs_of(ids)[at - 1, ids[at]]) for at in range(20, 30)]
    assert [entry["logprob"] for entry in answer["prompt_logprobs"][20:]] == pytest.approx(expected, abs=CLOSE)
