"""How much memory the images of all open requests may take."""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.request.generation_request import GenerationRequest

TOTAL_BYTES = 192 << 20  # less than what may wait in the connection to the scheduler, and in those to stages


class ImageMemory:
    """Bytes of images, as the encoder takes them. Used by the event loop only."""

    def __init__(self) -> None:
        self._taken = 0

    def refusal(self, request: GenerationRequest) -> ErrorInfo | None:
        """Why a request cannot be started now: the images of others take as much as there may be."""
        wanted = _bytes(request)
        if not wanted or self._taken + wanted <= TOTAL_BYTES:
            return None
        return refusals.IMAGES.error(taken=self._taken, wanted=wanted, most=TOTAL_BYTES)

    @contextmanager
    def taken(self, request: GenerationRequest) -> Iterator[None]:
        """While a request is open, its images are counted."""
        wanted = _bytes(request)
        self._taken += wanted
        try:
            yield
        finally:
            self._taken -= wanted


def _bytes(request: GenerationRequest) -> int:
    return sum(len(image.input.pixels) for image in request.images)
