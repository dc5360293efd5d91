"""From the images of a body to what the model's encoder takes, in threads beside the event loop.

data URL ─► bytes ─► header: kind, pixels ─► pixels, upright, RGB ─► the model's own processor ─► ImageInput
              │              │
      --max-image-bytes   --max-image-pixels, before anything is decompressed
"""

import asyncio
import struct
import zlib
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from headrace.core.config import ServerConfig
from headrace.core.types.errors import ConfigError, HeadraceError, invalid, shown
from headrace.core.types.requests.images import ImageInput, ImageTerms
from headrace.engine.model.source import resolve_source
from headrace.server.frontend.image_fetch import ImageFetcher
from headrace.server.frontend.request.image_memory import ImageMemory
from headrace.server.frontend.request.images import GivenImage, ImageTokens, RequestImage
from headrace.text.tokenizer import Tokenizer

THREADS = 2
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_INPUT_BYTES = 64 << 20  # that the encoder takes of all images of a request, one a pixel and colour
COLOURS = 3
ROW_END, END = "[IMG_BREAK]", "[IMG_END]"  # tokens of layout rows
TOO_LARGE = "image_too_large"
BROKEN = (
    OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, struct.error,
    zlib.error, Image.DecompressionBombError,
)  # fmt: skip
"""What pillow and processors raise for files that are no images, or none that they take."""


class ImageReader:
    """Reads images for one model. Used by the event loop; close() stops its threads."""

    def __init__(
        self, model: str, terms: ImageTerms, tokenizer: Tokenizer, config: ServerConfig, memory: ImageMemory
    ) -> None:
        """Load the model's processor. Raises ConfigError, with the reason, for a model without one that can be used."""
        self.tokens = _image_tokens(terms, tokenizer)
        self._processor = _load_processor(model)
        self._scale, self._shift = _scaling(self._processor)
        try:
            self._input("", Image.new("RGB", (6 * terms.pixels, 4 * terms.pixels)))
        except BROKEN as error:
            raise ConfigError(f"its image processor does not fit its encoder: {shown(str(error), 300)}") from error
        self._config = config
        self._fetcher = ImageFetcher(config.allowed_image_hosts, config.max_image_bytes)
        self._memory = memory
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        Image.MAX_IMAGE_PIXELS = None  # pillow's own limit warns; ours is checked before pixels are decompressed

    async def close(self) -> None:
        """Stop the threads; pending calls are cancelled."""
        await self._fetcher.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(self, given: Sequence[GivenImage]) -> tuple[RequestImage, ...]:
        """The images of a request, without their places. Raises HeadraceError: 400 for what is no image, 413 for too
        many or too large ones, 429 while others take the memory for images."""
        limit = self._config.max_images
        if len(given) > limit:
            text = f"the request has {len(given)} images; --max-images allows {limit}"
            raise invalid(given[limit].field, text, code="too_many_images", status=413)
        loop, images, total = asyncio.get_running_loop(), [], 0
        for each in given:
            scheme = each.url.partition(":")[0].lower()
            fetched = await self._fetcher.fetch(each.url, each.field) if scheme != "data" else None
            file, taken = await loop.run_in_executor(self._executor, self._read, each, fetched)
            self._memory.take(len(file) + len(taken.pixels))
            images.append(RequestImage(file, taken))
            total += len(taken.pixels)
            if total > MAX_INPUT_BYTES:
                text = f"the images up to {each.field} take {total} bytes as the encoder takes them; at most "
                raise invalid(each.field, f"{text}{MAX_INPUT_BYTES} are allowed", code=TOO_LARGE, status=413)
        return tuple(images)

    def _read(self, given: GivenImage, fetched: bytes | None) -> tuple[bytes, ImageInput]:
        """The bytes of an image, and what the encoder takes."""
        file = self._file(given) if fetched is None else fetched
        picture = self._picture(given.field, file)
        try:
            return file, self._input(sha256(file).hexdigest(), picture)
        except BROKEN as error:
            text = f"{given.field}: the model's processor does not take this image: {shown(str(error), 300)}"
            raise invalid(given.field, text) from error

    def _file(self, given: GivenImage) -> bytes:
        """The bytes of a data URL."""
        field, limit = given.field, self._config.max_image_bytes
        head, comma, text = given.url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise invalid(field, f"{field} is no data URL in base64; write data:image/png;base64,…")
        if len(text) // 4 * 3 > limit + 2:
            raise self._too_large(field, f"about {len(text) // 4 * 3} bytes", f"--max-image-bytes allows {limit}")
        try:
            file = b64decode(text, validate=True)
        except (Base64Error, ValueError) as error:
            raise invalid(field, f"{field} has no valid base64: {shown(str(error))}") from error
        if len(file) > limit:
            raise self._too_large(field, f"{len(file)} bytes", f"--max-image-bytes allows {limit}")
        return file

    def _picture(self, field: str, file: bytes) -> Image.Image:
        """The first frame of an image file, upright and in RGB."""
        limit = self._config.max_image_pixels
        try:
            with Image.open(BytesIO(file), formats=FORMATS) as image:
                width, height = image.size
                if width * height > limit:
                    what = f"{width} by {height} pixels"
                    raise self._too_large(field, what, f"--max-image-pixels allows {limit}")
                return ImageOps.exif_transpose(image).convert("RGB")
        except BROKEN as error:
            kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            text = f"{field} is no image that can be read as {kinds}: {shown(str(error), 200)}"
            raise invalid(field, text) from error

    def _input(self, digest: str, picture: Image.Image) -> ImageInput:
        terms, grid = self.tokens.terms, self.tokens.terms.layout == "grid"
        own = {} if grid else {"patch_size": terms.pixels}
        found = self._processor(images=[picture], do_rescale=False, do_normalize=False, return_tensors="np", **own)
        pixels = np.asarray(found["pixel_values"])
        if grid:
            _, high, wide = found["image_grid_thw"][0].tolist()
            rows, columns = high // terms.merge, wide // terms.merge
            edge = terms.pixels // terms.merge
            pixels = pixels.reshape(high * wide, COLOURS, terms.frames, edge, edge)[:, :, 0]
        else:
            high, wide = np.asarray(found["image_sizes"])[0].tolist()
            rows, columns = high // terms.pixels, wide // terms.pixels
            pixels = pixels.reshape(1, COLOURS, high, wide)
        length = rows * columns if grid else rows * (columns + 1) - 1
        data = np.rint(pixels).astype(np.uint8)
        return ImageInput(digest, 0, length, rows, columns, grid, data.tobytes(), data.shape, self._scale, self._shift)

    @staticmethod
    def _too_large(field: str, what: str, limit: str) -> HeadraceError:
        return invalid(field, f"{field} has {what}; {limit}", code=TOO_LARGE, status=413)


def _image_tokens(terms: ImageTerms, tokenizer: Tokenizer) -> ImageTokens:
    if terms.layout == "grid":
        return ImageTokens(terms)
    ids = [tokenizer.added_id(name) for name in (ROW_END, END)]
    if None in ids:
        raise ConfigError(f"its tokenizer lacks {ROW_END} or {END}")
    row_end, end = (each for each in ids if each is not None)
    return ImageTokens(terms, row_end, end)


def _scaling(processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a processor multiplies pixels by, and adds to them, for each colour."""
    factor = float(processor.rescale_factor) if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return (factor,) * COLOURS, (0.0,) * COLOURS
    means, deviations = (np.broadcast_to(each, COLOURS) for each in (processor.image_mean, processor.image_std))
    return tuple((factor / deviations).tolist()), tuple((-means / deviations).tolist())


def _load_processor(model: str) -> Any:
    from transformers import AutoImageProcessor  # imports torch, for models with images only

    try:
        return AutoImageProcessor.from_pretrained(
            resolve_source(model).path, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, ImportError, LookupError, TypeError) as error:
        raise ConfigError(f"its image processor cannot be loaded: {' '.join(str(error).split())[:300]}") from error
