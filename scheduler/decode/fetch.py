"""The way in by wire: pages are leased and expected here, then a prefill server is asked to fill them.

WAITING ─► lease, PrepareReceive ─► every stage ReceivePrepared ─► AskReserve, Reserved ─► chunks … ─► every stage
KvReceived
           └──────────────── FETCHING ────────────────────────────────────────────┘     └► GENERATING

A prefill server that writes into our pages itself may do so from AskReserve until it has said that the ticket has
ended, or our stages have made sure that nobody can write through its session any more (SessionClosed). Only then do
pages of requests that failed meanwhile go to others.
"""

import math

from headrace.core.messages.frontend import AddPrefill, PrefillState, RemovePrefill, Reserved
from headrace.core.messages.orders import CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import (
    AskReserve,
    ConnectPrefill,
    DisconnectPrefill,
    PrefillDown,
    PrefillUp,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import (
    ChunkReceived,
    KvReceived,
    ReceiveFailed,
    ReceivePrepared,
    SampledToken,
    SessionClosed,
)
from headrace.core.types.backends import writes_directly
from headrace.core.types.errors import PEER_GONE, ErrorInfo
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.request import FetchFrom, FirstToken
from headrace.scheduler.admission import no_prefill
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import PrefillPeer, State
from headrace.scheduler.state.transfers import IncomingTransfer, RemoteWriter

DEFAULT_STATUS = 502
FIRST_REASONS = ("", "stop", "length")  # why a first token may end its request; "" when it does not


class RemoteFetch:
    """Prefill servers, and the FETCHING phase."""

    def __init__(self, state: State, completion: Completion, generate: TokenGeneration) -> None:
        self._state = state
        self._completion = completion
        self._generate = generate
        self._generations = 0

    def add(self, event: AddPrefill) -> None:
        self._state.prefills.setdefault(event.name, PrefillPeer(event.name))
        self._state.out.add(ConnectPrefill(name=event.name, endpoint=event.endpoint, server_key=event.server_key))

    def remove(self, event: RemovePrefill, now: float) -> None:
        server = self._state.prefills.get(event.name)
        if server is None:
            self._state.drop("unknown_prefill")
            return
        self._lose(server, "removed", now)
        del self._state.prefills[event.name]
        self._state.out.add(DisconnectPrefill(name=event.name))

    def up(self, event: PrefillUp, now: float) -> None:
        """A session has begun. What came under the one before it is lost."""
        server = self._state.prefills.get(event.name)
        if server is None:
            self._state.drop("unknown_prefill")
            return
        if server.session is not None:
            self._lose(server, "a new session began", now)
        server.session = event.session
        server.endpoints = event.endpoints
        server.geometries = event.geometries
        server.window_bytes = event.window_bytes
        server.server_key = event.server_key
        server.backend = event.backend
        if self._state.ready:
            self._dial(server, event.session)
        self._state.out.add(PrefillState(name=event.name, up=True))

    def down(self, event: PrefillDown, now: float) -> None:
        server = self._state.prefills.get(event.name)
        if server is None or (event.session is not None and event.session != server.session):
            self._state.drop("unknown_prefill")
            return
        self._lose(server, event.reason, now)

    def introduce(self) -> None:
        """Have stages that have just come up dial."""
        for server in self._state.prefills.values():
            if server.session is not None:
                self._dial(server, server.session)

    def start(self, request: Request, now: float) -> bool:
        """Lease and expect; False when there are no pages or no metadata row for it now."""
        state, route = self._state, request.route
        assert isinstance(route, FetchFrom), "only such requests are fetched"
        server, ticket = state.prefills[route.prefill], route.ticket
        assert server.session is not None, "requests fail when their prefill server goes down"
        if not state.metadata_rows.free:
            return False
        lease = state.cache.acquire(request.tokens, request.salt)
        if lease is None:
            return False
        state.waiting.remove(request)
        request.lease = lease
        request.row = state.metadata_rows.allocate(1, request.arrival)[0]
        request.cached_tokens = lease.matched * state.config.page_size
        self._generations += 1
        request.incoming = incoming = IncomingTransfer(
            session=server.session,
            ticket=ticket,
            generation=self._generations,
            unready=set(state.stages),
            missing=set(state.stages),
            pages=len(lease.pages) - lease.matched,
            writer=RemoteWriter.IDLE if writes_directly(server.backend) else RemoteWriter.NONE,
        )
        state.fetches[incoming.key] = request
        state.unplanned -= request.unplanned
        request.planned = request.target
        request.known_to_stages = True
        state.counters.add("prompt_tokens_total", request.prompt_tokens)
        state.counters.add("cached_tokens_total", request.cached_tokens)
        state.enter(request, Phase.FETCHING, now)
        state.out.add(
            PrepareReceive(
                seq=state.out.next_seq(),
                request=request.serial,
                session=server.session,
                ticket=ticket,
                generation=incoming.generation,
                start=request.cached_tokens,
                count=request.prompt_tokens - request.cached_tokens,
                pages=pack(lease.pages[lease.matched :]),
                row=request.row,
            )
        )
        state.deadlines.set(Timer.ANSWER, request.arrival, now + state.config.stage_timeout_s)
        return True

    def expecting(self, event: ReceivePrepared) -> None:
        """When every stage is ready for the bytes, the prefill server may be told."""
        state = self._state
        request, incoming = self._fetching(event.request)
        if request is None or incoming is None or event.stage not in incoming.unready:
            state.drop("unknown_request")
            return
        incoming.unready.discard(event.stage)
        if incoming.unready:
            return
        assert request.lease is not None, "start() has seen to it"
        assert request.row is not None, "start() has seen to it"
        assert isinstance(request.route, FetchFrom), "only such requests are fetched"
        posting = request.route.posting
        state.deadlines.clear(Timer.ANSWER, request.arrival)
        incoming.reserve()
        state.out.add(
            AskReserve(
                session=incoming.session,
                ticket=incoming.ticket,
                generation=incoming.generation,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
                pages=pack(request.lease.pages[request.lease.matched :]),
                row=request.row,
                wait=posting != "done",
                prompt_hash=prompt_hash(request.submit.prompt) if posting != "local" else "",
            )
        )
        state.out.add(Reserved(rid=request.rid))

    def chunk_arrived(self, event: ChunkReceived) -> None:
        """Counted only: a prefill server that computes a long chunk is not silent, and a lost one ends its session."""
        request, incoming = self._fetching(event.request)
        if request is None or incoming is None:
            self._state.drop("unknown_request")

    def arrived(self, event: KvReceived, now: float) -> None:
        """A stage has all of its KV; with the last one the request goes on with its first token."""
        state = self._state
        request, incoming = self._fetching(event.request)
        if request is None or incoming is None or event.stage not in incoming.missing:
            state.drop("unknown_request")
            return
        if self._unfit(request, event.first, now):
            return
        incoming.missing.discard(event.stage)
        incoming.bytes += event.bytes
        incoming.chunks += event.chunks
        if incoming.missing:
            return
        assert request.lease is not None, "start() has seen to it"
        incoming.receive()
        del state.fetches[incoming.key]
        request.computed = request.target
        state.cache.publish(request.lease, request.tokens, request.computed)
        self._first(request, event.first, now)

    def fetch_failed(self, event: ReceiveFailed, now: float) -> None:
        request, _ = self._fetching(event.request)
        if request is None:
            self._state.drop("unknown_request")
            return
        error = ErrorInfo(code=event.code, message=event.message, status=DEFAULT_STATUS, stage=event.stage)
        self._completion.fail(request, error, now)

    def ticket_failed(self, event: TicketFailed, now: float) -> None:
        request = self._ended_ticket(event)
        if request is not None:
            self._completion.fail(request, event.error, now)

    def ticket_finished(self, event: TicketFinished, now: float) -> None:
        """The prefill ended the request with its first token. Bytes it had sent before may still be coming in."""
        request = self._ended_ticket(event)
        if request is None or self._unfit(request, event.first, now):
            return
        if event.first.finish_reason:
            self._first(request, event.first, now)
        else:
            self._bad_metadata(request, "the request goes on after its first token, and its KV has not come", now)

    def ticket_cancelled(self, event: TicketCancelled) -> None:
        """The answer to our cancel. Who asked has not waited for it, but its pages have if others write into them."""
        if (event.session, event.ticket, event.generation) in self._state.fetches:
            self._ended_ticket(event)

    def hung_up(self, event: SessionClosed) -> None:
        """A stage has made sure that nobody can write through an ended session any more."""
        state = self._state
        stages = state.revoking.get(event.session)
        if stages is None:
            return
        stages.discard(event.stage)
        if stages:
            return
        del state.revoking[event.session]
        for request in list(state.fetches.values()):
            if request.incoming is not None and request.incoming.session == event.session:
                request.incoming.stop_writer()
                self._completion.release_if_safe(request)

    def _unfit(self, request: Request, first: FirstToken, now: float) -> bool:
        """Fail a request whose metadata cannot be of its prompt and model; True when that was so."""
        vocab, logprob = self._state.vocab_size, first.logprob
        tokens = (first.token, *(logprob.top_ids if logprob is not None else ()))
        wanted = request.submit.sampling.logprobs is not None
        if min(tokens) < 0 or (vocab and max(tokens) >= vocab):
            text = f"the prefill server's first token is among {min(tokens)} to {max(tokens)}; there are {vocab}"
        elif first.prompt_tokens != request.prompt_tokens:
            text = f"the prefill server had {first.prompt_tokens} prompt tokens; the prompt has {request.prompt_tokens}"
        elif not 0 <= first.cached_tokens <= request.prompt_tokens:
            text = f"the prefill server had {first.cached_tokens} of {request.prompt_tokens} prompt tokens"
        elif wanted and logprob is None:
            text = "the prefill server sent no logprob of the first token, and the request asks for logprobs"
        elif logprob is not None and not all(map(math.isfinite, (logprob.logprob, *logprob.top_logprobs))):
            text = "the prefill server sent a logprob of the first token that is not finite"
        elif first.finish_reason not in FIRST_REASONS:
            text = f"the prefill server ended the request for an unknown reason, {first.finish_reason!r}"
        else:
            return False
        self._bad_metadata(request, text, now)
        return True

    def _bad_metadata(self, request: Request, text: str, now: float) -> None:
        self._completion.fail(request, ErrorInfo(code="bad_metadata", message=text, status=DEFAULT_STATUS), now)

    def _first(self, request: Request, first: FirstToken, now: float) -> None:
        request.cached_tokens = max(request.cached_tokens, first.cached_tokens)
        wanted = request.submit.sampling.logprobs is not None
        sampled = SampledToken(request.serial, first.token, first.logprob if wanted else None)
        self._generate.accept(request, sampled, now, first.finish_reason)

    def _fetching(self, serial: int) -> tuple[Request, IncomingTransfer] | tuple[None, None]:
        request = self._state.records.get(serial)
        if request is None or request.phase is not Phase.FETCHING or request.incoming is None:
            return None, None
        return request, request.incoming

    def _ended_ticket(self, event: TicketFailed | TicketFinished | TicketCancelled) -> Request | None:
        """The prefill server has ended a ticket, and writes nothing more for it. Returns its request if that lives."""
        request = self._state.fetches.get((event.session, event.ticket, event.generation))
        if request is None or request.incoming is None:
            self._state.drop("unknown_ticket")
            return None
        request.incoming.end()
        if not request.ended:
            return request
        self._completion.release_if_safe(request)
        return None

    def _lose(self, server: PrefillPeer, reason: str, now: float) -> None:
        """The server's session has ended: its requests fail, since nothing will come for them."""
        state = self._state
        session, server.session = server.session, None
        for request in list(server.requests.values()):
            if request.phase is Phase.WAITING and request.incoming is None:
                self._completion.fail(request, no_prefill(server.name, "down"), now)
            elif request.phase is Phase.FETCHING and request.incoming is not None:
                request.incoming.lose()
                error = ErrorInfo(code=PEER_GONE, message=f"the prefill server is gone: {reason}", status=502)
                self._completion.fail(request, error, now)
        if session is not None and state.ready:
            state.revoking[session] = set(state.stages)
            state.out.add(CloseSession(seq=state.out.next_seq(), session=session))
        state.out.add(PrefillState(name=server.name, up=False, reason=reason))

    def _dial(self, server: PrefillPeer, session: str) -> None:
        out = self._state.out
        out.add(
            OpenSession(
                seq=out.next_seq(),
                session=session,
                endpoints=server.endpoints,
                geometries=server.geometries,
                window_bytes=server.window_bytes,
                server_key=server.server_key,
                backend=server.backend,
            )
        )
