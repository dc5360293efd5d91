"""Open prompts of one server of a replay: what its front end has computed of prompts that still grow.

    change ─► piece ─► piece … ─► commit: the piece under way is finished, and the whole prompt is submitted

As OpenPrompts of the server does, for prompts of token ids, of which all tokens are stable.
"""

from collections.abc import Callable

from headrace.core.messages.frontend import Abort, open_piece
from headrace.core.messages.replies import Progress, RequestFailed, RequestFinished
from headrace.core.types.packed import packed_length
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Event
from headrace.testing.world import World


class _Growing:
    """An open prompt."""

    def __init__(self, terms: RequestTerms) -> None:
        self.terms = terms
        self.prompt = b""
        self.piece = ""  # rid of the one that is being computed; "": none is
        self.pieces = 0
        self.computed = 0
        self.committed: Callable[[], None] | None = None


class ReplayOpenPrompts:
    """A chain of pieces for each open prompt."""

    def __init__(self, world: World, page_size: int, handle: Callable[[Event], None]) -> None:
        """handle: takes the server's events."""
        self._world = world
        self._page_size = page_size
        self._handle = handle
        self._prompts: dict[str, _Growing] = {}
        self._pieces: dict[str, _Growing] = {}  # by rid, those that have not ended

    def change(self, name: str, prompt: bytes, terms: RequestTerms) -> None:
        """A prompt is opened under this name, or has grown to these tokens."""
        growing = self._prompts.setdefault(name, _Growing(terms))
        growing.prompt = prompt
        if not growing.piece:
            self._compute(name, growing, 0)

    def commit(self, name: str, go_on: Callable[[], None]) -> None:
        """A prompt has become a request: go on when what is being computed of it is finished, so that it is found in
        the cache. At once if no such prompt is open."""
        growing = self._prompts.pop(name, None)
        if growing is None or not growing.piece:
            go_on()
            return
        growing.committed = go_on
        self._handle(Abort(rid=growing.piece, finish=True))

    def computed(self, name: str) -> int:
        """Tokens of an open prompt whose KV was computed; 0 of one that is not open."""
        return self._prompts[name].computed if name in self._prompts else 0

    def progressed(self, progress: Progress) -> None:
        """A request has come on."""
        if (growing := self._pieces.get(progress.rid)) is not None:
            growing.computed = max(growing.computed, progress.done)

    def ended(self, end: RequestFinished | RequestFailed) -> bool:
        """A request has ended; False if it is no piece."""
        growing = self._pieces.pop(end.rid, None)
        if growing is None:
            return False
        name, growing.piece = end.rid.rpartition(".")[0], ""
        tried = end.usage.prompt_tokens if isinstance(end, RequestFinished) else packed_length(growing.prompt)
        go_on = growing.committed or (lambda: self._compute(name, growing, tried))
        self._world.at(self._world.now, go_on)
        return True

    def _compute(self, name: str, growing: _Growing, tried: int) -> None:
        """Compute the next piece, if there are pages to compute. tried: tokens of the one that has just ended."""
        done = max(growing.computed, tried)
        if name not in self._prompts or growing.piece or packed_length(growing.prompt) - done <= self._page_size:
            return
        growing.pieces += 1
        growing.piece = f"{name}.{growing.pieces}"
        self._pieces[growing.piece] = growing
        self._handle(open_piece(growing.piece, growing.prompt, growing.terms))
