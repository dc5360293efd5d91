"""Images of requests in the first stage: encoded when their first token is computed, kept until their last one is."""

from collections.abc import Callable

import numpy as np
import torch

from headrace.core.messages.orders import PlanRow
from headrace.core.types.requests.images import ImageInput
from headrace.engine.attention.paged import ImageRows

Encode = Callable[[ImageInput], ImageRows]


class RequestImages:
    """What is left to compute of the images of requests."""

    def __init__(self, encode: Encode) -> None:
        """encode: gives the embeddings of an image; their places are counted from its first token."""
        self._encode = encode
        self._waiting: dict[int, tuple[ImageInput, ...]] = {}
        self._encoded: dict[int, dict[int, ImageRows]] = {}

    def __len__(self) -> int:
        """Requests with images."""
        return len(self._waiting)

    def rows(self, row: PlanRow) -> ImageRows | None:
        """The embeddings of a row's image tokens, placed in the row; None if it has none. Images that end within the
        row are dropped."""
        if row.images:
            self._waiting[row.request] = row.images
        images = self._waiting.get(row.request)
        if not images:
            return None
        encoded, end = self._encoded.setdefault(row.request, {}), row.start + row.count
        parts: list[ImageRows] = []
        for image in images:
            if image.start >= end or image.end <= row.start:
                continue
            if image.start not in encoded:
                encoded[image.start] = self._encode(image)
            parts.append(_within(encoded[image.start], image.start - row.start, row.count))
            if image.end <= end:
                del encoded[image.start]
        left = tuple(image for image in images if image.end > end)
        if left:
            self._waiting[row.request] = left
        else:
            self.release(row.request)
        return _joined(parts) if parts else None

    def release(self, request: int) -> None:
        """Drop what is kept for a request; unknown requests are ignored."""
        self._waiting.pop(request, None)
        self._encoded.pop(request, None)


def _within(image: ImageRows, first: int, count: int) -> ImageRows:
    """The part of an image that is in a row of count tokens. first: place of its first token, before the row if it is
    negative."""
    places = image.places + first
    part = slice(*np.searchsorted(places, (0, count)).tolist())
    return ImageRows(places[part], image.embeddings[part], tuple(level[part] for level in image.levels))


def _joined(parts: list[ImageRows]) -> ImageRows:
    if len(parts) == 1:
        return parts[0]
    levels = zip(*(part.levels for part in parts), strict=True)
    return ImageRows(
        np.concatenate([part.places for part in parts]),
        torch.cat([part.embeddings for part in parts]),
        tuple(torch.cat(level) for level in levels),
    )
