"""Images on real pairs of servers: questions are answered with the tokens of transformers, whatever computes them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.expert_models import spoken
from tests.e2e.harness import Server, pair
from tests.models.image_models import NAMES, Oracle, Question, data_url, make_image_model

TOKENS = 12
FLAGS = ("--dtype", "float32", "--kv-pages", "128", "--chunk-tokens", "16", "--max-model-len", "512", "--threads", "1")


def answer(server: Server, question: Question) -> tuple[str, int, int]:
    """The text of an answer, and tokens of the prompt: all, and cached ones."""
    body = {"messages": question.messages, "max_tokens": TOKENS, "temperature": 0}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.mark.full
@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.parametrize("name", NAMES)
def test_questions_about_images_are_answered_as_transformers_does(name: str, stages: str, tmp_path: Path) -> None:
    oracle = Oracle(name, tmp_path, make_image_model(name, tmp_path))
    text = "what is to be seen in these pictures, and in which order?"
    questions = [
        oracle.clear("say what this is: ", text, tokens=TOKENS),
        oracle.clear("say what this is: ", text, tokens=TOKENS, seed=60),  # the same tokens, another image
        oracle.clear("one ", " and two ", text, tokens=TOKENS),
        oracle.clear("", "?", tokens=TOKENS),
    ]
    assert questions[0].ids == questions[1].ids
    assert questions[0].tokens != questions[1].tokens
    expected = [(spoken(oracle.tokenizer, each.ids, each.tokens), len(each.ids)) for each in questions]
    flags = ("--model", str(tmp_path), *FLAGS)
    with pair((*flags, "--pp", stages), flags) as (prefill, decode):
        with ThreadPoolExecutor(len(questions)) as pool:  # all at once, and beside a text
            plain = pool.submit(
                decode.post, "/v1/completions", {"prompt": questions[0].ids, "max_tokens": 4, "temperature": 0}
            )
            found = list(pool.map(lambda each: answer(decode, each), questions))
            assert plain.result().status_code == 200
        assert [each[:2] for each in found] == expected
        again = [answer(decode, each) for each in questions]  # from warm caches
        assert [each[:2] for each in again] == expected
        assert again[0][2] > 0
        body = {
            "prompt_token_ids": questions[1].ids,
            "images": [data_url(each) for each in questions[1].parts if isinstance(each, bytes)],
            "handoff": "none",
            "temperature": 0,
        }
        reply = prefill.post("/v1/prefill", body).json()
        assert reply["first_token"]["id"] == questions[1].tokens[0]
