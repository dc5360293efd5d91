"""How much memory images may take, from when they are read until their HTTP request has been answered."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.types import refusals

TOTAL_BYTES = 192 << 20  # less than what may wait in the connection to the scheduler, and in those to stages
_OWN: ContextVar[list[int]] = ContextVar("images")  # bytes of those of the HTTP request that is being answered


class ImageMemory:
    """Bytes of images: their files, and what the encoder takes. Used by the event loop only."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, size: int) -> None:
        """Count an image of so many bytes. Raises HeadraceError (429) if images take as much as they may."""
        if self._taken + size > TOTAL_BYTES:
            raise refusals.IMAGES.raised(taken=self._taken, wanted=size, most=TOTAL_BYTES)
        _OWN.get().append(size)
        self._taken += size

    @contextmanager
    def request(self) -> Iterator[None]:
        """While an HTTP request is answered; what it takes is given back then."""
        own: list[int] = []
        token = _OWN.set(own)
        try:
            yield
        finally:
            _OWN.reset(token)
            self._taken -= sum(own)


class CountImages:
    """Middleware: images of a request are counted while it is answered."""

    def __init__(self, app: ASGIApp, memory: ImageMemory) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with self._memory.request():
            await self._app(scope, receive, send)
