"""Images of a request, and their places among its tokens.

A chat template shows one token for each image; the model has as many as the image has embeddings, and in layout rows a
token behind each row and another one behind the last:

    grid   <start> img <end>   ─►  <start> img img img img <end>
    rows   img                 ─►  img img break img img end
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.core.types.errors import HeadraceError, invalid
from headrace.core.types.requests.images import ImageInput, ImageTerms


class GivenImage(NamedTuple):
    """An image of a body."""

    field: str
    """Names it in errors."""
    url: str


class RequestImage(msgspec.Struct, frozen=True):
    """An image of a request."""

    file: bytes
    """As the client has sent it."""
    input: ImageInput
    """As the model takes it."""

    @property
    def url(self) -> str:
        """Its file as a data URL."""
        return f"data:;base64,{b64encode(self.file).decode()}"


class ImageTokens(NamedTuple):
    """Tokens of images in a prompt."""

    terms: ImageTerms
    row_end: int = -1
    """Behind a row of tokens; layout rows."""
    end: int = -1
    """Behind the last row."""

    def of(self, image: ImageInput) -> list[int]:
        """Those of one image."""
        if self.terms.layout == "grid":
            return [self.terms.token] * (image.rows * image.columns)
        found = [*[self.terms.token] * image.columns, self.row_end] * image.rows
        return [*found[:-1], self.end]

    def expanded(
        self, ids: Sequence[int], images: Sequence[RequestImage], field: str
    ) -> tuple[list[int], tuple[RequestImage, ...]]:
        """A prompt with all tokens of its images in the place of one for each, and the images with their places. field:
        names the prompt in errors. Raises HeadraceError (400) for another number of tokens than of images: a text has
        some, or the chat template has none."""
        if (count := ids.count(self.terms.token)) != len(images):
            raise self._mismatch(field, count, len(images))
        found: list[int] = []
        placed: list[RequestImage] = []
        for token in ids:
            if token == self.terms.token:
                image = images[len(placed)]
                placed.append(_at(image, len(found)))
                found += self.of(image.input)
            else:
                found.append(token)
        return found, tuple(placed)

    def located(self, ids: Sequence[int], images: Sequence[RequestImage], field: str) -> tuple[RequestImage, ...]:
        """The images of a prompt that has all of their tokens, with their places. Raises HeadraceError (400) for tokens
        that are not those of the images."""
        placed: list[RequestImage] = []
        behind = 0
        for position, token in enumerate(ids):
            if token != self.terms.token or position < behind:
                continue
            wanted = self.of(images[len(placed)].input) if len(placed) < len(images) else []
            behind = position + len(wanted)
            if not wanted or list(ids[position:behind]) != wanted:
                text = f"{field} has tokens from position {position} on that are not those of image {len(placed)}"
                raise invalid(field, text)
            placed.append(_at(images[len(placed)], position))
        if len(placed) != len(images):
            raise self._mismatch(field, len(placed), len(images))
        return tuple(placed)

    def _mismatch(self, field: str, count: int, images: int) -> HeadraceError:
        text = (
            f"{field} has {count} places for images (token {self.terms.token}) and {images} images; texts must not "
            "have that token, and the chat template has to show each image"
        )
        return invalid(field, text)


def _at(image: RequestImage, start: int) -> RequestImage:
    return msgspec.structs.replace(image, input=msgspec.structs.replace(image.input, start=start))
