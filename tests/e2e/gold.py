"""What transformers says: the oracle of the end-to-end tests."""

from functools import cache
from importlib.resources import files
from typing import Any

import torch

from tests.engine.models import smollm2 as model
from tests.engine.models import transformers_tokenizer

SMOLLM2 = "smollm2"


@cache
def tokenizer() -> Any:
    return transformers_tokenizer(SMOLLM2)


@cache
def story_ids() -> tuple[int, ...]:
    """Token ids of the demo's real text."""
    text = (files("headrace.server") / "data" / "adventure.txt").read_text(encoding="utf-8")
    return tuple(tokenizer()(text)["input_ids"])


@cache
def greedy(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The next tokens, greedy, from transformers."""
    torch.set_num_threads(1)  # two would spin for each other while servers use the cores
    with torch.inference_mode():
        out = model().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


def greedy_text(prompt: tuple[int, ...], tokens: int) -> str:
    """The greedy continuation as text, without the token that ended it."""
    return str(tokenizer().decode(greedy(prompt, tokens), skip_special_tokens=True))
