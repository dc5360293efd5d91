"""Pieces of a decode server's open prompts: a prefill server has an open prompt with the tokens that are stable here.

    here    open ──────► append ──► truncate, or tokens that change ──► commit: the whole prompt goes to that server
              │             │              │                              │
    there   POST open     PATCH        truncate, PATCH                  DELETE

It computes them as it comes to it, and what it has computed is fetched meanwhile (EarlyKv): the commit gets the rest.
"""

import logging
from contextlib import suppress

import httpx
import msgspec

from headrace.core.messages.http_prefill import JSON_HEADERS, PREFILL_PATH, PrefillRequest
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import PREFILL_FAILED, ErrorInfo, HeadraceError
from headrace.integrations.http_client import connection_error
from headrace.server.frontend.open_prompts.early_kv import Computed, EarlyKv
from headrace.server.frontend.open_prompts.open_prompts import OnComputed, OpenPrompt, common
from headrace.server.frontend.prefix_moves import PrefixMoves
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)


class _State(msgspec.Struct, frozen=True):
    """What a prefill server says of an open prompt."""

    id: str
    computed: int


class RemotePrompt:
    """The open prompt at a prefill server that one of this server has. It stays there for all of its pieces."""

    def __init__(self, pool: PrefillPool, moves: PrefixMoves | None, prompt: OpenPrompt) -> None:
        self._pool = pool
        self._prompt = prompt
        self._early = EarlyKv(moves, prompt, self._look) if moves is not None else None
        self._server: PrefillServer | None = None
        self._id = ""
        self._tokens: tuple[int, ...] = ()
        self._refused = False  # it does not know open prompts, or takes none

    async def bring(self, request: GenerationRequest) -> int:
        """Tell the server what the tokens are now; returns how many of them it has computed. Raises HeadraceError."""
        if self._refused:
            return 0
        try:
            if self._server is None or not self._server.up:
                computed = await self._open(request)
            else:
                computed = await self._change(self._server, request.prompt)
        except HeadraceError as error:
            self._refused = not self._id and error.info.status < 500
            self._server, self._id = None, ""  # it has lost the prompt, or is gone: the next piece opens it anew
            raise
        if self._early is not None and not request.terms.adapter:
            self._early.changed(request)
        return computed

    async def close(self) -> None:
        """The prompt is not open any more."""
        await self.stop()
        if self._server is not None and self._id:
            with suppress(HeadraceError):
                await self._ask(self._server, "DELETE", f"/{self._id}", b"")

    async def stop(self) -> None:
        """Fetch nothing more."""
        if self._early is not None:
            await self._early.stop()

    async def _look(self) -> Computed | None:
        """Ask how much is computed, which its client is told, too. Raises HeadraceError."""
        server, sent, prompt = self._server, self._tokens, self._prompt
        if server is None or not server.up:
            return None
        state = await self._ask(server, "GET", f"/{self._id}", b"")
        shared = common(sent, prompt.tokens)
        computed = min(state.computed, shared)
        prompt.computed = max(prompt.computed, computed)
        return Computed(server, shared, computed)

    async def _open(self, request: GenerationRequest) -> int:
        terms = request.terms
        with self._pool.chosen(request.prompt, terms.prefix_salt) as choice:
            body = PrefillRequest(
                open=True,
                handoff="none",
                model=request.model if terms.adapter else None,
                adapter=terms.adapter or None,
                prompt_token_ids=request.prompt,
                cache_salt=terms.cache_salt,
            )
            state = await self._ask(choice.server, "POST", "", body.encoded())
        self._server, self._id, self._tokens = choice.server, state.id, request.prompt
        self._prompt.server = choice.server.url
        return state.computed

    async def _change(self, server: PrefillServer, tokens: tuple[int, ...]) -> int:
        state, shared = None, common(self._tokens, tokens)
        if shared < len(self._tokens):
            body = msgspec.json.encode({"tokens": max(1, shared)})
            state = await self._ask(server, "POST", f"/{self._id}/truncate", body)
            self._tokens = self._tokens[: max(1, shared)]
        if more := tokens[len(self._tokens) :]:
            state = await self._ask(server, "PATCH", f"/{self._id}", msgspec.json.encode({"append": more}))
            self._tokens += more
        return min(state.computed, common(self._tokens, tokens)) if state is not None else 0

    async def _ask(self, server: PrefillServer, method: str, path: str, body: bytes) -> _State:
        """Raises HeadraceError."""
        try:
            answer = await self._pool.ask(server, PREFILL_PATH + path, body, JSON_HEADERS, method=method)
            return _State("", 0) if method == "DELETE" else msgspec.json.decode(answer, type=_State)
        except httpx.HTTPError as error:
            raise HeadraceError(connection_error(server.url, error)) from error
        except (ValueError, *NO_MESSAGE) as error:
            message = f"prefill server {server.url} sent an unexpected response: {error}"
            raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message=message, status=502)) from error


class RemotePiece:
    """What is new of an open prompt is sent to its prefill server."""

    def __init__(self, remote: RemotePrompt, request: GenerationRequest) -> None:
        self._remote = remote
        self._request = request

    async def run(self, on_computed: OnComputed) -> None:
        """Send it. Raises HeadraceError."""
        on_computed(await self._remote.bring(self._request))

    def finish(self) -> None:
        """The prefill server is told when the prompt ends, and what is new of it with the next piece."""


class RemotePieces:
    """Pieces of all open prompts of a decode server. moves: fetches what is computed of them; None: without a prefix
    cache here."""

    def __init__(self, pool: PrefillPool, moves: PrefixMoves | None) -> None:
        self._pool = pool
        self._moves = moves
        self._prompts: dict[str, RemotePrompt] = {}  # by the ids that they have here

    def piece(self, prompt: OpenPrompt, request: GenerationRequest) -> RemotePiece:
        """A piece of a prompt. request: with its tokens."""
        remote = self._prompts.get(prompt.id)
        if remote is None:
            remote = self._prompts[prompt.id] = RemotePrompt(self._pool, self._moves, prompt)
        return RemotePiece(remote, request)

    async def closed(self, prompt: OpenPrompt) -> None:
        """Give up what a prefill server has of it."""
        if (remote := self._prompts.pop(prompt.id, None)) is not None:
            await remote.close()

    async def stop(self) -> None:
        """The server stops: the prompts expire at the prefill servers."""
        for remote in self._prompts.values():
            await remote.stop()
