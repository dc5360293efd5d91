"""One handoff: a prompt's KV from a prefill server into the pool, and from there to whichever decode engine reads it.

    choice of a server ─► POST /v1/prefill ─┐
                       └► LoadKv ───────────┴─► last byte is in place ─► lease ─► kv_transfer_params

A prompt that a prefill server refuses or fails goes to another one, as on a decode server of ours.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import TOO_LONG, ErrorInfo, HeadraceError, invalid
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.requests.adapters import MAX_SALT_CHARS
from headrace.core.types.requests.kv_hints import KvHintsEnvelope
from headrace.core.types.requests.remote_prefill import PrefillDecision, RemoteForecast
from headrace.core.types.requests.request import SamplingParams, Timing, Usage
from headrace.core.types.requests.terms import RequestTerms
from headrace.gateway.vllm.kv_loads import KvLoads
from headrace.peer.commands import Loaded, LoadKv, TicketRef
from headrace.server.api.request.terms import session_digest
from headrace.server.frontend.generation.prefill_failover import PrefillFailover, PromptServers
from headrace.server.frontend.request.generation_request import GenerationRequest, GenerationResult
from headrace.server.frontend.request.request_context import CallSpan, RequestContext
from headrace.server.upstream.prefill_call import PrefillCall, PrefillProgress
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

NO_KV = "no_kv"  # code of a load whose prompt ended with its first token
SAMPLING = SamplingParams(
    temperature=0.0, max_tokens=2
)  # with one token alone the request would end before the KV goes


class Exporter(Protocol):
    """Offers loaded KV to decode engines."""

    def offer(self, load: str, first_page: int, tokens: int, jobs: int = 1) -> dict[str, Any]:
        """Open a lease on the pages of a load. Returns kv_transfer_params."""
        ...

    def withdraw(self, load: str) -> None:
        """End the lease of an offer that no decode engine was told of."""
        ...


class HandoffPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to hand over."""

    tokens: tuple[int, ...]
    jobs: int
    """Times that the decode engine will read it: equal prompts in the body × n."""
    cache_salt: str = ""
    priority: int = 0
    session_id: str = ""
    """Name of the conversation, "" for none."""
    kv_hints: KvHintsEnvelope | None = None
    """What is to become of the KV in the prefill server's cache."""
    context: RequestContext = RequestContext("")


class LeftToEngine(Exception):
    """The decode engine is to compute the prompt, since that costs less."""

    def __init__(self, reason: Literal["cheaper_here", "cached_here"]) -> None:
        super().__init__(reason)
        self.reason = reason


Decide = Callable[[HandoffPrompt, PrefillServer, RemoteForecast | None], PrefillDecision]
"""Where a prompt is computed for which this prefill server was chosen, which is expected to take so much."""


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """KV that a decode engine may read."""

    load: str
    params: dict[str, Any]
    """kv_transfer_params."""
    result: GenerationResult
    """Result of the prefill, for the log."""


class Handoffs:
    """Hands prompts over. page_tokens: block size of the decode engines. max_model_len: theirs. pages: of the pool."""

    def __init__(
        self,
        prefills: PrefillPool,
        failover: PrefillFailover,
        loads: KvLoads,
        exporter: Exporter,
        clock: Clock,
        *,
        page_tokens: int,
        max_model_len: int,
        pages: int,
    ) -> None:
        self.decide: Decide | None = None
        """Set where costs are compared."""

        self._prefills = prefills
        self._failover = failover
        self._loads = loads
        self._exporter = exporter
        self._clock = clock
        self._page_tokens = page_tokens
        self._max_model_len = max_model_len
        self._pages = pages
        self._learning: set[asyncio.Task[None]] = set()
        self._leased: dict[str, int] = {}  # pages of loads that are under way, or offered and not free yet

    @property
    def leased_pages(self) -> int:
        """Pages of the pool that are in use: loads under way, offers to be read, offers in quarantine."""
        return sum(self._leased.values())

    def fits(self, tokens: int) -> bool:
        """Whether a prompt fits into the pool when it is empty."""
        return self._pages_for(tokens) <= self._pages

    def check(self, tokens: Sequence[int]) -> None:
        """Raises HeadraceError (400) for a prompt that the decode engines would refuse."""
        if not tokens:
            raise invalid("prompt", "prompt is empty; it has to have a token at least", code="empty_prompt")
        if len(tokens) > self._max_model_len:
            text = f"the prompt has {len(tokens)} tokens and the decode engines take {self._max_model_len} in all"
            raise invalid("prompt", text, code=TOO_LONG)

    async def hand_over(self, prompt: HandoffPrompt) -> KvOffer:
        """Have the prompt computed, load its KV and offer it. Raises LeftToEngine; HeadraceError, of code NO_KV if
        there is none. Cancelling it cancels the prompt at the prefill server, and the load."""
        arrived = self._clock.now()
        request = GenerationRequest(
            rid=f"gw-{secrets.token_hex(16)}",
            prompt=prompt.tokens,
            sampling=SAMPLING,
            terms=RequestTerms(
                cache_salt=_salt(prompt.cache_salt), priority=prompt.priority, session=session_digest(prompt.session_id)
            ),
            kv_hints=prompt.kv_hints,
            context=prompt.context,
        )

        async def attempt(
            left: GenerationRequest, choice: PrefillChoice, _servers: PromptServers
        ) -> tuple[Loaded, GenerationResult]:
            began = self._clock.now()
            if self.decide is not None:
                decision = self.decide(prompt, choice.server, self._prefills.forecast(choice))
                if not decision.remote:
                    self._prefills.withdraw(choice)
                    raise LeftToEngine("cached_here" if decision.reason == "cached_here" else "cheaper_here")
            loaded = await self._load(left, choice)
            first = loaded.first
            usage = Usage(len(left.prompt), 1, first.cached_tokens, first.from_tiers)
            timing = Timing(bootstrap_s=began - arrived, forward_s=self._clock.now() - began)
            return loaded, GenerationResult(
                finish_reason=None, usage=usage, timing=timing, peer=choice.server.url, kv="handoff"
            )

        loaded, result = await self._failover.run(request, arrived, lambda: False, attempt)
        first_page = loaded.at // self._page_tokens
        params = self._exporter.offer(loaded.id, first_page, len(prompt.tokens), jobs=prompt.jobs)
        return KvOffer(load=loaded.id, params=params, result=result)

    def withdraw(self, offer: KvOffer) -> None:
        """No decode engine will be told of the offer."""
        self._exporter.withdraw(offer.load)

    def released(self, load: str) -> None:
        """The pages of a load are free again."""
        self._leased.pop(load, None)

    def _pages_for(self, tokens: int) -> int:
        return ceil_div(tokens, self._page_tokens)

    async def _load(self, request: GenerationRequest, choice: PrefillChoice) -> Loaded:
        """Have the chosen server compute the prompt, and load its KV meanwhile. Raises HeadraceError (at_prefill)."""
        ticket, server = f"gw-{secrets.token_hex(16)}", choice.server
        assert server.target is not None, "it is up"
        command = LoadKv(
            id=ticket,
            ticket=TicketRef(name=ticket, host=server.host, port=server.target.control_port),
            start=0,
            tokens=len(request.prompt),
            prompt_hash=prompt_hash(pack(request.prompt)),
        )
        span = CallSpan(request.context, server.url, self._clock, lambda _span: None)
        async with self._prefills.prefill_call(choice, _body(request, ticket, server), span) as call:
            load = self._loads.begin(command)
            self._leased[ticket] = self._pages_for(command.tokens)
            began = self._clock.now()
            try:
                loaded = await self._first_outcome(call, load)
                self._learn(call, choice, self._clock.now() - began)
                return loaded
            except BaseException:
                self._loads.give_up(ticket)
                self.released(ticket)
                if load.done() and not load.cancelled():
                    load.exception()  # it is known
                raise

    def _learn(self, call: PrefillCall, choice: PrefillChoice, took_s: float) -> None:
        """Have the pool learn what the handoff has added to the prefill server's own time, once that says it."""

        async def observe() -> None:
            response = await call.response()
            if response is not None and response.own_s is not None:
                self._prefills.handed_over(choice, took_s - response.own_s)

        if self.decide is not None:
            task = asyncio.create_task(observe())
            self._learning.add(task)
            task.add_done_callback(self._learning.discard)

    async def _first_outcome(self, call: PrefillCall, load: "asyncio.Future[Loaded]") -> Loaded:
        """Post the prompt and wait for its KV, or for what the prefill server fails it with."""
        failed: asyncio.Future[ErrorInfo] = asyncio.get_running_loop().create_future()

        def on_error(error: ErrorInfo) -> None:
            if not failed.done():
                failed.set_result(error)

        call.start(_ignore, on_error)
        await asyncio.wait((load, failed), return_when=asyncio.FIRST_COMPLETED)
        if not load.done():
            raise HeadraceError(failed.result())
        try:
            return load.result()
        except HeadraceError as error:
            if error.info.code == NO_KV:
                raise HeadraceError(msgspec.structs.replace(error.info, at_prefill=False)) from error
            raise HeadraceError(await call.refusal(error.info)) from error


def _ignore(_progress: PrefillProgress) -> None:
    """A gateway reports no progress."""


def _body(request: GenerationRequest, ticket: str, server: PrefillServer) -> PrefillRequest:
    """Body of POST /v1/prefill: what it samples is not looked at."""
    return PrefillRequest(
        rid=request.rid,
        ticket=ticket,
        prompt_token_ids=request.prompt,
        temperature=request.sampling.temperature,
        max_tokens=request.sampling.max_tokens,
        ignore_eos=True,
        priority=request.terms.priority,
        cache_salt=request.terms.cache_salt or None,
        kv_hints=request.kv_hints if server.knows_hints else None,
        session_id=(request.terms.session or None) if server.knows_session_id else None,
    )


def _salt(given: str) -> str:
    """A salt that prefill servers take: decode engines take longer ones."""
    if len(given) <= MAX_SALT_CHARS:
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
