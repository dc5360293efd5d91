"""A Llama whose tokenizer writes characters outside its vocabulary as bytes, as Llama 2 does: texts come whole."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from headrace.text.byte_fallback import REPLACEMENT
from tests.e2e.harness import Server, serving
from tests.engine.models import CONFIGS, save_model
from tests.text.decoders import byte_fallback

FLAGS = ("--role", "colocated", "--kv-pages", "64", "--max-model-len", "256", "--threads", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_fallback(strip=True)
    (end,) = tokenizer.eos_ids
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_token_id": end, "bos_token_id": None}
    save_model(LlamaConfig(**{**CONFIGS["llama"].to_dict(), **sizes}), folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, eos_token="</s>").save_pretrained(folder)
    with serving("--model", str(folder), *FLAGS) as started:
        yield started


def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(server: Server, body: dict[str, Any]) -> list[str]:
    answer = server.post("/v1/completions", {**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice["text"] for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.full
@pytest.mark.parametrize(
    "text", ["日本語", "ok 🤗 done", "日本語のテキストを書きます", "🤗" * 30, "hello there", " a", "नमस्ते"]
)
def test_any_text_comes_as_it_was_written(server: Server, text: str) -> None:
    body = {"prompt": "say", "max_tokens": 200, "structured_outputs": {"choice": [text]}}
    found = whole(server, body)
    assert (found["text"], found["finish_reason"]) == (text, "stop")
    parts = streamed(server, body)
    assert "".join(parts) == text
    assert len([part for part in parts if part]) > len(text) / 2, "they come one by one"


def test_a_text_that_is_cut_within_a_character_keeps_the_ones_before(server: Server) -> None:
    body = {"prompt": "say", "max_tokens": 8, "structured_outputs": {"choice": ["本書本書"]}}
    found = whole(server, body)
    assert found["finish_reason"] == "length"
    assert found["text"] == "本書" + REPLACEMENT
    assert "".join(streamed(server, body)) == found["text"]


@pytest.mark.parametrize("seed", range(3))
def test_random_tokens_give_the_same_text_streamed_and_whole(server: Server, seed: int) -> None:
    """What such a model says is hardly ever UTF-8."""
    body = {"prompt": "say", "max_tokens": 120, "temperature": 1.5, "seed": seed, "ignore_eos": True}
    assert "".join(streamed(server, body)) == whole(server, body)["text"]
