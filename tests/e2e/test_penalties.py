"""Penalties and biases on a pair whose decode server has two stages and too few pages: texts are those of transformers'
logits, each row with its own parameters."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.core.types.requests.request import SamplingParams
from tests.e2e import gold
from tests.e2e.harness import pages_in_use, pair, wait_until
from tests.engine.sampling.test_adjusted import by_hand

TOKENS = 14
FLAGS = ("--chunk-tokens", "32", "--max-model-len", "128", "--threads", "1")
ASKED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 0.9, "frequency_penalty": -0.5, "logit_bias": {"253": 3, "30": -100}},
]


def expected_text(prompt: tuple[int, ...], fields: dict[str, Any]) -> str:
    biases = tuple((int(token), float(bias)) for token, bias in fields.get("logit_bias", {}).items())
    params = SamplingParams(**{**fields, "logit_bias": biases})
    torch.set_num_threads(1)  # two would spin for each other while servers use the cores
    text: list[int] = []
    with torch.inference_mode():
        while len(text) < TOKENS:
            logits = gold.model()(torch.tensor([[*prompt, *text]])).logits[0, -1].float()
            adjusted = by_hand(logits.tolist(), params, list(prompt), text)
            text.append(max(range(len(adjusted)), key=adjusted.__getitem__))
    return str(gold.tokenizer().decode(text, skip_special_tokens=True))


@pytest.mark.full
def test_texts_of_a_pair_are_those_of_transformers() -> None:
    prompts = [gold.story_ids()[start : start + 40] for start in (0, 100)]
    work = [(prompt, fields) for prompt in prompts for fields in ASKED]
    expected = [expected_text(*each) for each in work]
    assert len(set(expected)) == len(work), "every kind of parameters changes the text"
    with pair(("--kv-pages", "256", *FLAGS), ("--pp", "2", "--page-size", "8", "--kv-pages", "30", *FLAGS)) as (
        _,
        decode,
    ):

        def text(each: tuple[tuple[int, ...], dict[str, Any]]) -> str:
            prompt, fields = each
            body = {"prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
            answer = decode.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(len(work)) as threads:
            assert list(threads.map(text, work)) == expected
        assert decode.total("headrace_preemptions_total") > 0
        wait_until(lambda: pages_in_use(decode) == 0, 5, "pages back")
