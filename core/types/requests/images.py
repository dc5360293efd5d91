"""Images of a prompt: where their tokens are, what the encoder takes, and positions for rotary embedding (mrope).

    token ids   … start  img img img img img img  end  word …      an image of 2 rows, 3 columns of tokens
    temporal           7   8   8   8   8   8   8   11    12
    height             7   8   8   8   9   9   9   11    12        8 + row
    width              7   8   9  10   8   9  10   11    12        8 + column; behind it: 8 + max(rows, columns)

Source of the positions: Qwen2-VL (arXiv:2409.12191), as in transformers' get_rope_index().
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Literal

import msgspec

from headrace.core.types.packed import ITEM_BYTES, pack

AXES = 3
"""Temporal, height and width."""


class ImageTerms(msgspec.Struct, frozen=True):
    """How a model takes images."""

    layout: Literal["grid", "rows"]
    """grid: an image's tokens are side by side, with rotary positions by row and column (Qwen). rows: each row of
    tokens ends in a token of its own, and rotary positions are places in the prompt (Pixtral)."""
    token: int
    """Id of the tokens that an image's embeddings take the place of."""
    pixels: int
    """Pixels of an edge of the square that becomes one token."""
    merge: int
    """Patches of such an edge."""
    levels: int = 0
    """First layers behind which an image is added to hidden states once more (deepstack)."""
    frames: int = 1
    """Of a patch, in models that take videos, too; layout grid."""


class ImageInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image of a prompt."""

    digest: str
    """SHA-256 of the file that the client has sent, in hexadecimal."""
    start: int
    """Position of its first token in the prompt."""
    length: int
    """Positions from its first token to its last one; those of layout rows have others between."""
    rows: int
    """Of its tokens."""
    columns: int
    mrope: bool = False
    """Its tokens have rotary positions by row and column."""
    pixels: bytes = b""
    """What the encoder takes, in 8 bits, before it is scaled."""
    shape: tuple[int, ...] = ()
    """Of the pixels; the second axis is the colours."""
    scale: tuple[float, ...] = ()
    """What pixels are multiplied by, for each colour."""
    shift: tuple[float, ...] = ()
    """What is added to them then."""

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.length


def images_digest(images: Iterable[ImageInput]) -> str:
    """SHA-256 over the images of a prompt and their places, in hexadecimal; "" for none."""
    listed = ["\n".join((image.digest, str(image.start))) for image in images]
    return sha256("\n".join(listed).encode()).hexdigest() if listed else ""


def page_key(tokens: bytes | bytearray, start: int, page_size: int, images: Iterable[ImageInput] = ()) -> bytes:
    """What tells the page of a prompt from all others behind the same prefix: its packed token ids, and of each image
    with a place on it, by place, the digest (32 bytes), the first position and the number of positions (int32,
    little-endian). tokens: of the prompt, packed. start: the page's first position. images: of the prompt."""
    end = start + page_size
    own = bytes(tokens[start * ITEM_BYTES : end * ITEM_BYTES])
    for image in images:
        if image.start < end and start < image.end:
            own += bytes.fromhex(image.digest) + pack([image.start, image.length])
    return own


def rotary_positions(images: Sequence[ImageInput], start: int, count: int) -> bytes:
    """Rotary positions of the positions [start, start + count) of a prompt and of what follows it: packed, one axis
    after the other; b"" where they are the positions themselves."""
    turned = [image for image in images if image.mrope]
    end = start + count
    if not turned or end <= turned[0].start:
        return b""
    axes = [array("i") for _ in range(AXES)]
    at = shift = 0
    for image in turned:
        _add_text(axes, range(max(at, start), min(image.start, end)), shift)
        first = image.start + shift
        for place in range(max(image.start, start), min(image.end, end)):
            row, column = divmod(place - image.start, image.columns)
            for axis, position in zip(axes, (first, first + row, first + column), strict=True):
                axis.append(position)
        at, shift = image.end, shift + _shift(image)
    _add_text(axes, range(max(at, start), end), shift)
    return b"".join(pack(axis) for axis in axes)


def next_position(images: Sequence[ImageInput], prompt_tokens: int) -> int:
    """The rotary position of the first token behind a prompt."""
    return prompt_tokens + sum(_shift(image) for image in images if image.mrope)


def _add_text(axes: "list[array[int]]", places: range, shift: int) -> None:
    for axis in axes:
        axis.extend(range(places.start + shift, places.stop + shift))


def _shift(image: ImageInput) -> int:
    """By how much rotary positions fall behind places in the prompt with this image."""
    return max(image.rows, image.columns) - image.length
