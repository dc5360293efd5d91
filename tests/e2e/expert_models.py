"""Small models with experts for servers under test, and what transformers says after prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from headrace.engine.model.stub import stub_tokenizer
from headrace.text.tokenizer import load_tokenizer
from tests.e2e.harness import Server
from tests.e2e.models import spoken
from tests.e2e.texts import complete
from tests.engine.models import CONFIGS

VOCABULARY = 300
TOKENS = 6
LENGTHS = (1, 16, 40, 150)
CLEAR = 1e-2  # by which the best logit of every position compared is above the second
FLAGS = ("--served-model-name", "experts", "--kv-pages", "128", "--chunk-tokens", "64")
QWEN3_MOE = Qwen3MoeConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, num_experts=6, num_experts_per_tok=2,
    moe_intermediate_size=16, mlp_only_layers=[0], norm_topk_prob=True, initializer_range=0.3,
)  # fmt: skip
Texts = dict[tuple[int, ...], str]


def family(name: str) -> PreTrainedConfig:
    """A small model of CONFIGS for a tokenizer of bytes."""
    config = CONFIGS[name]
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": None, "bos_token_id": None}
    return type(config)(**{**config.to_dict(), **tokens})


def save_experts(folder: Path, config: PreTrainedConfig = QWEN3_MOE) -> Path:
    """Save a random model, and a tokenizer of bytes. Returns the folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    stub_tokenizer(f"stub:vocab={VOCABULARY}").save(str(folder / "tokenizer.json"))
    return folder


def clear_texts(folder: Path, lengths: Sequence[int] = LENGTHS, model: PreTrainedModel | None = None) -> Texts:
    """What clear_tokens() says, as texts. model: None reads that of the folder."""
    model = model or AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(str(folder), "")
    return {prompt: spoken(tokenizer, prompt, tokens) for prompt, tokens in clear_tokens(model, lengths).items()}


def clear_tokens(model: PreTrainedModel, lengths: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Greedy tokens of transformers after a prompt of each length, of which no rounding can change any."""
    found: dict[tuple[int, ...], list[int]] = {}
    for length in lengths:
        for seed in range(100):
            generator = torch.Generator().manual_seed(1000 * length + seed)  # prompts share no prefix
            prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
            if (tokens := _clear_greedy(model, prompt)) is not None:
                found[tuple(prompt)] = tokens
                break
    assert len(found) == len(lengths)
    return found


def _clear_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int] | None:
    """Greedy tokens, or None where a second token comes close."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        with torch.inference_mode():
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < CLEAR:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def text_after(server: Server, prompt: tuple[int, ...], **fields: Any) -> str:
    """The text of a server, greedy."""
    return complete(server, prompt, TOKENS, model="experts", **fields)
