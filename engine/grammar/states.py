"""The grammars of the requests that one sampler has: compiled on a thread beside the forward pass, advanced by each
sampled token.

    row with GrammarStart ─► compile, replay its tokens ─┐ thread
                                                         ▼
    logits ─► mask of what the grammar allows ─► sampler ─► accept the token ─┐
                 ▲                                                            │
                 └────────── next mask, while the next pass computes ◄────────┘ thread
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.core.types.requests.constraint import GrammarStart
from headrace.engine.grammar.compiler import Grammar, GrammarCompiler, GrammarError

STEP_S = 1.0  # of CPU time for the mask of one token: others wait meanwhile
Mask = NDArray[np.bool_]  # which tokens may come next: [vocabulary]


class GrammarStates:
    """Grammars by request. Used by the compute thread alone; make: the compiler, made with the first constraint."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._compiler: GrammarCompiler | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._starting: dict[int, Future[Grammar]] = {}
        self._grammars: dict[int, Grammar] = {}
        self._accepted: list[int] = []  # requests whose next masks are not being computed yet
        self._masks: dict[int, Future[dict[int, Mask | GrammarError]]] = {}

    def begin(self, rows: Iterable[PlanRow]) -> None:
        """Begin to compile what rows bring; call it before their forward pass."""
        for row in rows:
            if row.grammar is not None:
                if self._compiling is None:
                    self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
                self._starting[row.request] = self._compiling.submit(self._start, row.grammar)

    def mask(self, row: PlanRow) -> Mask | None:
        """Which tokens may be sampled for a row: [vocabulary]; None for a request without a constraint. Waits for its
        grammar to be compiled. Raises GrammarError if the grammar cannot go on."""
        if row.sample is None or not row.sample.grammar:
            return None
        grammar = self._grammar(row.request)
        ahead = self._masks.pop(row.request, None)
        found = _mask(grammar) if ahead is None else ahead.result()[row.request]
        if isinstance(found, GrammarError):
            raise found
        return found

    def accept(self, request: int, token: int) -> None:
        """A token was sampled for a request. Raises GrammarError if its grammar does not allow it."""
        if (grammar := self._grammars.get(request)) is not None:
            grammar.accept((token,))
            self._accepted.append(request)

    def look_ahead(self) -> None:
        """Begin to compute the next masks of all requests that have accepted a token, while the next pass computes."""
        if not self._accepted:
            return
        if self._masking is None:
            self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        grammars = {request: self._grammars[request] for request in self._accepted}
        masks = self._masking.submit(lambda: {request: _mask(grammar) for request, grammar in grammars.items()})
        self._masks |= dict.fromkeys(self._accepted, masks)
        self._accepted.clear()

    def release(self, request: int) -> None:
        """Drop the grammar of a request; unknown requests are ignored."""
        self._starting.pop(request, None)
        self._grammars.pop(request, None)
        self._masks.pop(request, None)

    def _grammar(self, request: int) -> Grammar:
        starting = self._starting.pop(request, None)
        if starting is not None:
            self._grammars[request] = starting.result()
        if request not in self._grammars:
            raise GrammarError("its constraint is not known here")
        return self._grammars[request]

    def _start(self, start: GrammarStart) -> Grammar:
        try:
            if self._compiler is None:
                self._compiler = self._make()
            grammar = self._compiler.compile(start.constraint)
            grammar.accept(packed.unpack(start.tokens).tolist())
            return grammar
        except GrammarError:
            raise
        except Exception as error:  # such as a library that is not installed: one request fails, not the stage
            raise GrammarError(f"it cannot be compiled here: {type(error).__name__}: {error}") from error


def _mask(grammar: Grammar) -> Mask | GrammarError:
    """The next mask, or why there is none."""
    before = time.thread_time()
    try:
        allowed = grammar.mask()
    except GrammarError as error:
        return error
    if (took := time.thread_time() - before) > STEP_S:
        return GrammarError(f"the mask of one token took {took:.2f} s, and {STEP_S:g} s are the limit")
    return allowed if allowed.any() else GrammarError("it allows no token")
