"""A small random Llama with SmolLM2's tokenizer, for what is not about texts: prompts and answers are token ids."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from tests.e2e import gold
from tests.engine.models import Saved, save_model

TOKENS = 12
IDS = 1000  # that prompts are made of
CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    initializer_range=0.2,  # so that greedy tokens are far apart
    tie_word_embeddings=True,
    eos_token_id=None,
    bos_token_id=None,
)
ENGINE = ("--skip-tokenizer-init",)


def made(folder: Path) -> Saved:
    gold.tokenizer().save_pretrained(folder)
    return save_model(CONFIG, folder)


def prefill_flags(model: Saved) -> tuple[str, ...]:
    """Of a prefill server."""
    return ("--role", "prefill", "--model", str(model.folder), "--max-model-len", "4096", "--threads", "1")


def asked(ids: list[int], tokens: int = TOKENS, **sampling: Any) -> dict[str, Any]:
    """A body for /generate."""
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": {**greedy, **sampling}}


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(length + 10_000 * seed)
    return [int(token) for token in torch.randint(0, IDS, (length,), generator=generator)]


def greedy(model: Saved, ids: list[int], tokens: int = TOKENS) -> list[int]:
    """The next tokens, by transformers."""
    found = list(ids)
    with torch.inference_mode():
        for _ in range(tokens):
            found.append(int(model.model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]
