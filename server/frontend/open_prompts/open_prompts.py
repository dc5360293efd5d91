"""Open prompts: what clients have sent of prompts that are still to grow, and the pieces of them that are computed.

    open ─► append, truncate … ─► commit: the whole prompt goes on as any request
      │         └► a piece at a time: the tokens that are stable so far; what comes meanwhile is the next one
      └────────────────────────► deleted, or expired: nothing of it is left but cached pages

A prompt expires a set time after its last change. Its pieces are requests of the scheduler that end without a token
(Submit.open), so that nothing is held for it between them: its KV is in the prefix cache, and is retained there for as
long, within the bound of its tenant (--retain-percent).
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

import msgspec

from headrace.core.runtime.background import Tasks
from headrace.core.runtime.clock import Clock
from headrace.core.stats import Counters, Sample
from headrace.core.types import refusals
from headrace.core.types.errors import NOT_NOW, UNKNOWN_RID, HeadraceError, invalid, shown
from headrace.core.types.requests.kv_hints import Retain
from headrace.server.frontend.request.generation_request import GenerationRequest

log = logging.getLogger(__name__)

OpenEnd = Literal["committed", "deleted", "expired"]
ALREADY_COMMITTED = "already_committed"
KEPT_COMMITTED = 1024  # ids of prompts that were committed, which are told from unknown ones
PIECE_DELAY_S = 0.01  # many a prompt is committed as soon as its last part was appended: one pass computes all then

OnComputed = Callable[[int], None]
Own = Callable[[GenerationRequest], GenerationRequest]


class OpenPiece(Protocol):
    """A piece that is being computed."""

    async def run(self, on_computed: OnComputed) -> None:
        """Compute it to its end. on_computed: is told how many tokens of the prompt have their KV. Raises
        HeadraceError."""
        ...

    def finish(self) -> None:
        """End it with what is computed, and what is being computed."""
        ...


class OpenPrompt:
    """One prompt that is not committed. content: what its client has sent, for whoever makes tokens of it."""

    def __init__(self, name: str, request: GenerationRequest, ticket: str | None, content: Any) -> None:
        self.id = name
        self.request = request
        """What its pieces have in common; without a prompt."""
        self.ticket = ticket
        self.content = content
        self.tokens: tuple[int, ...] = ()
        self.stable = 0
        """Tokens that are not expected to change by what is appended."""
        self.computed = 0
        """Tokens of which the KV was computed."""
        self.pieces = 0
        self.server = ""
        """URL of the prefill server that computes its pieces; "": this server does."""
        self.expires = 0.0
        """Time by the server's clock."""
        self.lock = asyncio.Lock()
        """Held while the prompt is changed: changes come one after the other."""
        self.piece: OpenPiece | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def tenant(self) -> str:
        """Whose prompt it is."""
        return self.request.terms.tenant


class Pieces(Protocol):
    """Where the pieces of open prompts are computed."""

    def piece(self, prompt: OpenPrompt, request: GenerationRequest) -> OpenPiece:
        """A piece of a prompt. request: with its tokens."""
        ...

    async def closed(self, prompt: OpenPrompt) -> None:
        """A prompt is not open any more, and none of its pieces is being computed."""
        ...

    async def stop(self) -> None:
        """The server stops: end what is done for prompts that were not closed."""
        ...


class OpenPrompts:
    """The open prompts of a server, and the tasks that have their pieces computed. Used in one event loop."""

    def __init__(
        self,
        pieces: Pieces,
        own: Own,
        clock: Clock,
        *,
        most: int,
        seconds: float,
        page_size: int,
        prefix_cache: bool,
        delay_s: float = PIECE_DELAY_S,
    ) -> None:
        """own: makes requests those of their tenants. most: prompts of one tenant; 0: none. seconds: after its last
        change in which one expires. Pieces have at least a page; none are computed without a prefix cache. delay_s:
        of a piece, after the change that it begins with."""
        self._pieces = pieces
        self._own = own
        self._clock = clock
        self._most = most
        self._seconds = seconds
        self._page_size = page_size
        self._computes = prefix_cache
        self._delay_s = delay_s
        self._prompts: dict[str, OpenPrompt] = {}
        self._committed: dict[str, str] = {}  # tenants, by id; the oldest first
        self._tasks = Tasks()
        self._counters = Counters()

    def open(self, request: GenerationRequest, ticket: str | None, content: Any) -> OpenPrompt:
        """A new prompt, without tokens. Raises HeadraceError: 400 if this server takes none, 429 if its tenant has as
        many as it may."""
        if not self._most:
            raise invalid("open", "open prompts are not taken here (--open-prompts 0)", code="unsupported")
        own = sum(prompt.tenant == request.terms.tenant for prompt in self._prompts.values())
        if own >= self._most:
            raise refusals.OPEN_PROMPTS.raised(own=own)
        retain = Retain.of_open_prompt(self._seconds)  # hints are for the end of the whole prompt
        terms = msgspec.structs.replace(request.terms, retain=retain, demote=False, let_go=False)
        request = msgspec.structs.replace(request, terms=terms)
        prompt = OpenPrompt(f"open-{secrets.token_hex(16)}", request, ticket, content)
        self._prompts[prompt.id] = prompt
        self._touch(prompt)
        return prompt

    def get(self, name: str, tenant: str) -> OpenPrompt:
        """An open prompt of a tenant. Raises HeadraceError: 409 if it was committed, 404 if there is none with this id
        any more, or it is another tenant's."""
        prompt = self._prompts.get(name)
        if prompt is not None and prompt.tenant == tenant:
            return prompt
        if self._committed.get(name) == tenant:
            text = f"the open prompt {shown(name)!r} was committed; it cannot be changed any more"
            raise invalid("id", text, code=ALREADY_COMMITTED, status=409)
        raise invalid("id", f"no prompt {shown(name)!r} is open", code=UNKNOWN_RID, status=404)

    def change(self, prompt: OpenPrompt, content: Any, tokens: tuple[int, ...], stable: int) -> None:
        """A prompt has changed: compute what is new of it. Raises HeadraceError as get() does, if it has ended
        meanwhile."""
        self.get(prompt.id, prompt.tenant)
        shared = common(prompt.tokens, tokens)
        if shared < prompt.computed and prompt.piece is not None:
            prompt.piece.finish()  # it computes what is not part of the prompt any more
        prompt.computed = min(prompt.computed, shared // self._page_size * self._page_size)
        prompt.content, prompt.tokens, prompt.stable = content, tokens, stable
        self._touch(prompt)
        if prompt.task is None and self._has_piece(prompt, 0):
            prompt.task = self._tasks.start(self._compute(prompt))

    async def commit(self, prompt: OpenPrompt) -> None:
        """End a prompt whose whole is submitted now: what is being computed of it is finished first, so that it is
        found in the cache. Raises HeadraceError as get() does."""
        self.get(prompt.id, prompt.tenant)
        self._end(prompt, "committed")
        if prompt.task is not None:
            await asyncio.wait([prompt.task])

    def reopen(self, prompt: OpenPrompt) -> None:
        """The commit of a prompt was refused for now: it stays open."""
        if self._committed.pop(prompt.id, None) is not None:
            self._prompts[prompt.id] = prompt
            self._touch(prompt)

    @asynccontextmanager
    async def reopening(self, prompt: OpenPrompt | None) -> AsyncIterator[None]:
        """Runs the request of a commit: where the server cannot take it now, the prompt stays open. None: it is another
        request."""
        try:
            yield
        except HeadraceError as error:
            if prompt is not None and error.info.status in NOT_NOW:
                self.reopen(prompt)
            raise

    def drop(self, name: str, tenant: str) -> bool:
        """End a prompt that is not wanted any more; False if its tenant has none with this id."""
        prompt = self._prompts.get(name)
        if prompt is None or prompt.tenant != tenant:
            return False
        self._end(prompt, "deleted")
        return True

    def expires_s(self, prompt: OpenPrompt) -> float:
        """Seconds that are left of a prompt."""
        return max(0.0, round(prompt.expires - self._clock.now(), 3))

    def samples(self) -> tuple[Sample, ...]:
        """Metrics."""
        tokens = sum(len(prompt.tokens) for prompt in self._prompts.values())
        gauges = (Sample("open_prompts", len(self._prompts)), Sample("open_prompt_tokens", tokens))
        return (*gauges, *self._counters.snapshot())

    async def close(self) -> None:
        """Forget all prompts; their pieces are cancelled."""
        for prompt in list(self._prompts.values()):
            self._end(prompt, "deleted")
        await self._tasks.cancel()
        await self._pieces.stop()

    def _touch(self, prompt: OpenPrompt) -> None:
        if prompt.timer is not None:
            prompt.timer.cancel()
        prompt.expires = self._clock.now() + self._seconds
        loop = asyncio.get_running_loop()
        prompt.timer = loop.call_later(self._seconds, self._end, prompt, "expired")

    def _end(self, prompt: OpenPrompt, how: OpenEnd) -> None:
        if self._prompts.pop(prompt.id, None) is None:
            return
        self._counters.add("open_prompts_total", labels=(how,))
        if prompt.timer is not None:
            prompt.timer.cancel()
        if prompt.piece is not None:
            prompt.piece.finish()
        self._tasks.start(self._close(prompt))
        if how == "committed":
            self._committed[prompt.id] = prompt.tenant
            if len(self._committed) > KEPT_COMMITTED:
                del self._committed[next(iter(self._committed))]

    async def _close(self, prompt: OpenPrompt) -> None:
        if prompt.task is not None:
            await asyncio.wait([prompt.task])
        await self._pieces.closed(prompt)

    def _has_piece(self, prompt: OpenPrompt, tried: int) -> bool:
        """Whether there are pages to compute. tried: tokens that a piece had which has just ended."""
        done = max(prompt.computed, tried)
        return self._computes and prompt.id in self._prompts and prompt.stable - done > self._page_size

    async def _compute(self, prompt: OpenPrompt) -> None:
        """Compute pieces until there is nothing new."""
        tried = 0
        try:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            while self._has_piece(prompt, tried):
                tokens = prompt.tokens[: prompt.stable]
                prompt.pieces += 1
                rid = f"{prompt.id}.{prompt.pieces}"
                request = self._own(msgspec.structs.replace(prompt.request, rid=rid, prompt=tokens))
                prompt.piece = self._pieces.piece(prompt, request)
                self._counters.add("open_pieces_total")
                await prompt.piece.run(lambda computed, tokens=tokens: _computed(prompt, tokens, computed))  # type: ignore[misc]
                tried = common(tokens, prompt.tokens)
        except HeadraceError as error:
            log.info("%s: a piece was not computed: %s", prompt.id, error.info.message)
        finally:
            prompt.task = prompt.piece = None


def _computed(prompt: OpenPrompt, tokens: tuple[int, ...], computed: int) -> None:
    """Note what a piece with these tokens has got."""
    if prompt.tokens[:computed] == tokens[:computed]:
        prompt.computed = max(prompt.computed, computed)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two prompts begin with in common."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
