"""A model with experts on a real server: the texts of transformers at one and two stages, and its experts' load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from headrace.engine.model.stub import stub_tokenizer
from headrace.server.tokenizer.tokenizer import load_tokenizer
from tests.e2e.harness import Server, pair, serving, wait_until
from tests.e2e.models import spoken

VOCABULARY = 300
TOKENS = 6
LENGTHS = (1, 16, 40, 150)
CLEAR = 1e-2  # by which the best logit of every position compared is above the second
FLAGS = ("--served-model-name", "experts", "--kv-pages", "128", "--chunk-tokens", "64")
Texts = dict[tuple[int, ...], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with a dense layer, and a tokenizer of bytes."""
    made = tmp_path_factory.mktemp("experts")
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=16, mlp_only_layers=[0], norm_topk_prob=True, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    stub_tokenizer(f"stub:vocab={VOCABULARY}").save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    """What transformers says after prompts where no rounding can change it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(str(folder), "")
    found: Texts = {}
    for length in LENGTHS:
        for seed in range(100):
            generator = torch.Generator().manual_seed(1000 * length + seed)  # prompts share no prefix
            prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
            if (tokens := clear_greedy(model, prompt)) is not None:
                found[tuple(prompt)] = spoken(tokenizer, prompt, tokens)
                break
    assert len(found) == len(LENGTHS)
    return found


def clear_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int] | None:
    """Greedy tokens, or None where a second token comes close."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        with torch.inference_mode():
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < CLEAR:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def check(server: Server, texts: Texts) -> None:
    for prompt, expected in texts.items():
        body: dict[str, Any] = {"model": "experts", "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected


@pytest.mark.parametrize("stages", [1, 2])
def test_texts_are_those_of_transformers_and_every_row_is_counted(folder: Path, texts: Texts, stages: int) -> None:
    with serving("--role", "colocated", "--model", str(folder), "--pp", str(stages), *FLAGS) as server:
        check(server, texts)
        # Prompts and all generated tokens but the last go through two experts of each of three layers.
        tokens = sum(len(prompt) + TOKENS - 1 for prompt in texts)
        wait_until(lambda: server.total("headrace_stage_expert_rows_total") == 2 * 3 * tokens, 10, "rows counted")
        layers = server.get("/debug/experts").json()["layers"]
        assert [each["layer"] for each in layers] == [1, 2, 3]
        assert [sum(each["rows"]) for each in layers] == [2 * tokens] * 3
        assert {len(each["rows"]) for each in layers} == {6}
        values = server.metrics()
        for stage in range(stages):
            assert values[f'headrace_expert_imbalance{{stage="{stage}"}}'] >= 1


def test_a_prompt_is_handed_over(folder: Path, texts: Texts) -> None:
    with pair(("--model", str(folder), *FLAGS), ("--model", str(folder), *FLAGS)) as (_, server):
        check(server, texts)
