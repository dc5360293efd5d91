"""Adapters of small random models, made by peft and saved in its format, and the models that it merges them into."""

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

SPREAD = 0.15  # of random weights: an adapter then changes most of the next tokens


class Adapter(NamedTuple):
    folder: Path
    model: nn.Module
    """The model with the adapter merged into it by peft."""

    def flag(self, name: str) -> str:
        """Of --lora."""
        return f"{name}={self.folder}"


def save_adapter(model: PreTrainedModel, folder: Path, seed: int, **fields: Any) -> Adapter:
    """An adapter with random weights. fields: of LoraConfig."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what that is about to drop
        adapted = get_peft_model(deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **fields))
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=SPREAD)
        adapted.save_pretrained(str(folder))
        merged: nn.Module = PeftModel.from_pretrained(deepcopy(model), str(folder)).merge_and_unload().eval()
    return Adapter(folder, merged)
