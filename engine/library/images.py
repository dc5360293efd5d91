"""Images in transformers' modules: encoded one by one by a model's own encoder, merged by the model's own forward().

A wrapper of several inputs takes what its encoder has made in the place of pixels (mm_encoder_outputs, transformers
5.23), so a pass over chunks of several requests hands it the embeddings of their image tokens, in the order of tokens.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from headrace.core.types.requests.images import ImageInput, ImageTerms
from headrace.engine.attention.paged import AttentionSpan, ImageRows
from headrace.engine.model.library_spec import Encoding

COLOURS = 3
GRID_TOKENS = 16384  # of the largest image that their processors make, as models are published
LIVE_BYTES = 48  # of a patch in a layer, for each element of its width: most while float32 queries and keys are rotated
GRIDS = ("qwen2_5_vl", "qwen3_vl")  # model types by their layouts, see ImageTerms
ROWS = ("mistral3",)


BOTH_WAYS = ("gemma3",)


def why_no_images(config: PreTrainedConfig) -> str:
    """Why a model's images are not served; "" if they are."""
    if config.model_type in (*GRIDS, *ROWS):
        return ""
    if config.model_type in BOTH_WAYS:
        return "tokens of its images see each other both ways, so that no chunk may cut an image"
    return "its encoder is not known" if hasattr(config, "vision_config") else "it has no encoder of images"


def image_terms(config: PreTrainedConfig) -> ImageTerms | None:
    """How a model takes images; None for one whose images are not served."""
    if config.model_type in GRIDS:
        vision = config.vision_config
        levels = len(getattr(vision, "deepstack_visual_indexes", ()))
        merge = vision.spatial_merge_size
        size, frames = vision.patch_size * merge, vision.temporal_patch_size
        return ImageTerms("grid", config.image_token_id, size, merge, levels, frames)
    if config.model_type in ROWS:
        merge = config.spatial_merge_size
        return ImageTerms("rows", config.image_token_id, config.vision_config.patch_size * merge, merge)
    return None


def image_encoding(config: PreTrainedConfig, terms: ImageTerms) -> Encoding:
    """What encoding an image takes. Layers are at their largest in the rotation of queries and keys, as long as an MLP
    is not five times as wide; beside them are the pixels, what each level gives, and for layout rows a mask."""
    vision, width = config.vision_config, config.get_text_config(decoder=True).hidden_size
    patches = terms.merge**2
    pixels = terms.frames * COLOURS * (terms.pixels // terms.merge) ** 2
    tokens, masked = GRID_TOKENS, 0
    if terms.layout == "rows":
        tokens = (vision.image_size // terms.pixels) ** 2
        masked = tokens * patches
    of_patch = LIVE_BYTES * vision.hidden_size + 6 * pixels + 2 * masked
    return Encoding(tokens, patches * of_patch + 2 * width * (1 + terms.levels))


class ImageEncoder:
    """The encoder of a model's images, and how what it makes gets into a pass."""

    def __init__(self, body: nn.Module, terms: ImageTerms, device: str) -> None:
        """body: of the model, all of it but the head."""
        self._body: Any = body
        self._terms = terms
        self._device = device

    def encode(self, image: ImageInput) -> ImageRows:
        """The embeddings of an image's tokens. Raises ValueError for pixels that do not give as many."""
        found = self._body.get_image_features(**self._inputs(image), return_dict=True)
        embeddings = torch.cat(tuple(found.pooler_output))
        count = image.rows * image.columns
        if len(embeddings) != count:
            raise ValueError(f"an image of {count} tokens has {len(embeddings)} embeddings")
        levels = tuple(torch.cat(tuple(each)) for each in getattr(found, "deepstack_features", None) or ())
        step = image.columns + (image.length > count)  # rows of tokens end in one that is no image token
        places = np.arange(image.rows)[:, None] * step + np.arange(image.columns)
        return ImageRows(places.ravel(), embeddings, levels)

    def inputs(self, ids: Tensor, spans: Sequence[AttentionSpan]) -> Mapping[str, Any]:
        """What forward() of the model takes beside token ids int64 [tokens] of a pass: what its encoder has made.

        A token with the id of image tokens that belongs to no image (a client has written it) keeps its embedding.
        """
        marked = (ids == self._terms.token).nonzero()[:, 0]
        embeddings: Tensor = self._body.get_input_embeddings()(ids[marked])
        levels = [torch.zeros_like(embeddings) for _ in range(self._terms.levels)]
        first = 0
        for span in spans:
            if span.image is not None:
                places = torch.from_numpy(span.image.places + first).to(ids.device)
                at = torch.searchsorted(marked, places)
                for into, rows in zip((embeddings, *levels), (span.image.embeddings, *span.image.levels), strict=True):
                    into[at] = rows.to(into.dtype)
            first += span.count
        made = SimpleNamespace(pooler_output=(embeddings,), deepstack_features=[(level,) for level in levels])
        return {"mm_encoder_outputs": {"image": made}}

    def _inputs(self, image: ImageInput) -> dict[str, Tensor]:
        """What the encoder takes. Layout grid: a still image is the same in all frames of a patch."""
        terms, device = self._terms, self._device
        given = torch.from_numpy(np.frombuffer(image.pixels, np.uint8).reshape(image.shape).copy()).to(device)
        scale, shift = (torch.tensor(each, device=device)[:, None, None] for each in (image.scale, image.shift))
        pixels = given.float() * scale + shift
        if terms.layout == "grid":
            patches = image.rows * terms.merge, image.columns * terms.merge
            frames = pixels[:, :, None].expand(-1, -1, terms.frames, -1, -1).flatten(1)
            return {"pixel_values": frames, "image_grid_thw": torch.tensor([[1, *patches]], device=device)}
        edges = image.rows * terms.pixels, image.columns * terms.pixels
        return {"pixel_values": pixels, "image_sizes": torch.tensor([edges], device=device)}
