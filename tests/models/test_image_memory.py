"""What an encoder of images takes while it computes, at the widths of published models: estimated from above."""

import math
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.core.types.requests.images import ImageInput
from headrace.engine.library.images import ImageEncoder, image_encoding, image_terms

TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 99,
}  # fmt: skip
VISION = {
    "Qwen2_5_VL": {
        "depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {"depth": 3, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
    "Mistral3": {"num_hidden_layers": 2},
}  # fmt: skip
"""By the names of transformers' classes: what makes them small, or is published and no default."""


class Peak(TorchDispatchMode):
    """Bytes of tensors that are alive at a time, made within."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given | self._known:
                storage = each.untyped_storage()
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.live -= size


@pytest.mark.parametrize("name", VISION)
def test_an_image_takes_no_more_than_is_planned(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(vision_config=VISION[name], text_config=TEXT)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(
            config, attn_implementation="sdpa"
        )
    model = model.bfloat16().to_empty(device="cpu").eval()
    terms = image_terms(config)
    assert terms is not None
    rows, columns, edge = 16, 24, terms.pixels // terms.merge
    grid = terms.layout == "grid"
    shape = (
        (rows * columns * terms.merge**2, 3, edge, edge)
        if grid
        else (1, 3, rows * terms.pixels, columns * terms.pixels)
    )
    image = ImageInput(
        "0" * 64, 0, rows * columns if grid else rows * (columns + 1) - 1, rows, columns,
        pixels=bytes(math.prod(shape)), shape=shape, scale=(1.0,) * 3, shift=(0.0,) * 3,
    )  # fmt: skip
    with torch.inference_mode(), Peak() as peak:
        ImageEncoder(model.model, terms, "cpu").encode(image)
    encoding = image_encoding(config, terms)
    masks = 0 if grid else 2 * (encoding.most_tokens - rows * columns) * terms.merge**4  # that larger images have
    planned = rows * columns * (encoding.token_bytes - masks)
    assert peak.peak <= planned <= 1.5 * peak.peak
