"""Fetching KV: pages are leased and made ready here, then a prefill server is asked to fill them.

WAITING ─► lease, PrepareReceive ─► every stage: ReceivePrepared ─► AskReserve, Reserved ─► chunks … ─► every stage:
           └──────────────── FETCHING ──────────────────────────────────────────┘              KvReceived ─► GENERATING

A prefix (FetchFrom.prefix) is fetched into the prefix cache for requests to come: its request ends with KvReceived.

A prefill server that writes into our pages itself may do so from AskReserve until it has said that the ticket has
ended, or our stages have made sure that nothing can be written through its session any more (SessionClosed). Only then
do pages of requests that failed meanwhile go to others: see core/incoming.py.
"""

import math
from functools import partial

from msgspec.structs import replace

from headrace.core.incoming import IncomingTransfer
from headrace.core.messages.peers import TicketCancelled, TicketFailed, TicketFinished
from headrace.core.messages.replies import Reserved
from headrace.core.messages.stage_events import (
    ChunkReceived,
    KvReceived,
    ReceiveFailed,
    ReceivePrepared,
    SampledToken,
    SessionClosed,
)
from headrace.core.types import refusals
from headrace.core.types.errors import PREFILL_FAILED, ErrorInfo
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.requests.outcomes import FETCHED
from headrace.core.types.requests.request import PREFIX, FetchFrom, FirstToken
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.kv.kv_cache import Lease
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.queues.deadlines import AnswerTimer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

BAD_GATEWAY = 502
FIRST_REASONS = ("", "stop", "length")  # why a first token may end its request; "" when it does not


class RemoteFetch:
    """The FETCHING phase of requests whose KV a prefill server has."""

    def __init__(self, state: State, completion: Completion, generation: TokenGeneration) -> None:
        self._state = state
        self._completion = completion
        self._generation = generation
        self._generations = 0

    def start(self, request: Request, now: float) -> bool:
        """Lease pages and have the stages prepare for them. False when there are no pages, or no metadata row, now."""
        state, route, replica = self._state, request.route, self._state.of(request)
        assert isinstance(route, FetchFrom), "only such requests are fetched"
        hello = state.prefills[route.prefill].hellos.get(replica.index)
        assert hello is not None, "requests fail when their prefill server goes down"
        if request.preempted and not self._worth_fetching(request, replica):
            self._completion.compute_here(request, "cached", now)
            return True
        lease = self._lease(request, route, replica, now)
        if lease is None:
            if route.prefix:
                self._completion.fail(request, refusals.PAGES_NEEDED.error(), now)
            return route.prefix
        request.lease = lease
        self.leased(request)
        cached = lease.matched * state.config.page_size
        if cached >= request.target:  # a prefix that has come otherwise
            request.cached_tokens = cached
            self._completion.complete(request, FETCHED, now)
            return True
        request.row = state.metadata_rows.allocate(1, request.arrival)[0]
        self._generations += 1
        reservation = Reservation(
            ticket=route.ticket,
            generation=self._generations,
            prompt_tokens=request.target,
            cached_tokens=cached,
            pages=pack(lease.pages[lease.matched :]),
            row=request.row,
            slot=lease.slot,
            wait=route.posting != "done",
            prompt_hash=_hash_wanted(request, route),
            adapter=request.terms.adapter,
        )
        incoming = IncomingTransfer.begin(hello.session, hello.terms.backend, reservation, replica.ranks)
        request.incoming = incoming
        state.prefills.start_fetch(request)
        replica.queues.plan(request, request.target - request.planned)
        request.on_stages.known = True
        if not request.preempted:
            request.cached_tokens = cached
            if not route.prefix:
                state.metrics.counters.add("prompt_tokens_total", request.prompt_tokens)
                state.metrics.counters.add("cached_tokens_total", cached)
        state.enter(request, Phase.FETCHING, now)
        replica.order(incoming.prepare(state.out.next_seq(), request.serial, prefix=route.prefix))
        state.deadlines.set(AnswerTimer(request.arrival), now + state.config.stage_timeout_s)
        return True

    def _lease(self, request: Request, route: FetchFrom, replica: Replica, now: float) -> Lease | None:
        """Pages for what is to be fetched, if there is a metadata row, too. What only moves cached KV ends for them,
        and does not take them itself from others."""
        rows, makes_way = self._state.metadata_rows, not route.prefix
        if not rows.free and not (makes_way and self.make_way(replica, now) and rows.free):
            return None
        acquire = partial(
            replica.cache.acquire,
            request.packed(0, request.target),
            request.salt,
            request.images,
            computed=False,
            whole=route.prefix,
            tenant=request.terms.tenant,
            spare=route.spare,
        )
        lease = acquire()
        if lease is None and makes_way and self.make_way(replica, now):
            lease = acquire()
        return lease

    def leased(self, request: Request) -> None:
        """A request has its pages. Those that another attempt at it has left are its own, or of no use."""
        self._completion.started(request)

    def make_way(self, replica: Replica, now: float) -> bool:
        """A request lacks pages, or a metadata row: end what only moves cached KV. False if nothing does."""
        return self._completion.end_moves(replica, refusals.PAGES_NEEDED.error(), now)

    def _worth_fetching(self, request: Request, replica: Replica) -> bool:
        """More than one pass of a preempted request's prefill is not in the prefix cache here."""
        cached = replica.cache.cached_positions(request.tokens, request.salt, request.images, request.target)
        return request.target - cached > self._state.config.chunk_tokens

    def receive_prepared(self, event: ReceivePrepared) -> None:
        """A stage is ready for the bytes. Once every stage is, reserve the pages at the prefill server."""
        state = self._state
        request, incoming = self._fetching(event.request)
        if request is None or incoming is None or event.stage not in incoming.unready:
            state.drop("unknown_request")
            return
        ask = incoming.prepared(event.stage)
        if ask is None:
            return
        state.deadlines.clear(AnswerTimer(request.arrival))
        state.out.add(ask)
        again = (incoming.ticket, request.target) if request.preempted else ("", 0)
        cached = incoming.reservation.cached_tokens
        state.out.add(Reserved(rid=request.rid, ticket=again[0], tokens=again[1], cached=cached))

    def chunk_received(self, event: ChunkReceived) -> None:
        """No deadline depends on it: a prefill server that computes a long chunk is not silent, and one that is lost
        ends its session. It counts if the fetch fails."""
        _, incoming = self._fetching(event.request)
        if incoming is None or event.stage not in incoming.until:
            self._state.drop("unknown_request")
        else:
            incoming.came(event.stage, event.until)

    def kv_received(self, event: KvReceived, now: float) -> None:
        """A stage has all of its KV. Once every stage has, the request goes on with its first token.

        The pages are published after its first plan here, whose results show whether the KV is finite.
        """
        state = self._state
        request, incoming = self._fetching(event.request)
        if request is None or incoming is None or event.stage not in incoming.missing:
            state.drop("unknown_request")
            return
        if self._reject_metadata(request, event.first, now):
            return
        if not incoming.arrived(event.stage, event.bytes, event.chunks):
            return
        assert request.lease is not None, "start() has leased pages"
        state.prefills.end_fetch(request)
        request.computed = request.target
        if isinstance(request.route, FetchFrom) and request.route.prefix:
            state.of(request).cache.publish(request.lease, request.tokens, request.computed)
            self._completion.complete(request, FETCHED, now)
            return
        if request.preempted:
            state.metrics.counters.add("refetches_total", labels=("fetched",))
            self._generation.resume(request, now)
            return
        if _first_token_forbidden(request, event.first):  # the prompt is computed here, from its cached pages
            state.of(request).cache.publish(request.lease, request.tokens, request.computed)
        self._accept_first_token(request, event.first, now)

    def receive_failed(self, event: ReceiveFailed, now: float) -> None:
        """A stage got bad KV."""
        request, _ = self._fetching(event.request)
        if request is None:
            self._state.drop("unknown_request")
            return
        error = ErrorInfo(
            code=event.code, message=event.message, status=BAD_GATEWAY, stage=event.stage, at_prefill=True
        )
        self._completion.fail(request, error, now)

    def ticket_failed(self, event: TicketFailed, now: float) -> None:
        """The prefill server failed the ticket."""
        request = self._end_ticket(event)
        if request is not None:
            self._completion.fail(request, replace(event.error, at_prefill=True), now)

    def ticket_finished(self, event: TicketFinished, now: float) -> None:
        """The prefill ended the request with its first token. Bytes that were sent before may still be coming in."""
        request = self._end_ticket(event)
        if request is None or self._reject_metadata(request, event.first, now):
            return
        if event.first.finish_reason not in ("", PREFIX) and not request.preempted:
            self._accept_first_token(request, event.first, now)
        else:
            self._bad_metadata(request, "the request goes on after its first token, and its KV has not come", now)

    def ticket_cancelled(self, event: TicketCancelled, now: float) -> None:
        """The answer to our cancel: pages that the prefill server could write directly are freed now. We have not asked
        to cancel a live request: its KV does not come."""
        if self._state.prefills.fetched((event.session, event.ticket, event.generation)) is None:
            return
        request = self._end_ticket(event)
        if request is not None:
            text = "the prefill server said that the ticket was cancelled, which nobody had asked for"
            error = ErrorInfo(code=PREFILL_FAILED, message=text, status=BAD_GATEWAY, at_prefill=True)
            self._completion.fail(request, error, now)

    def session_closed(self, event: SessionClosed) -> None:
        """A stage has made sure that nothing can be written through an ended session any more."""
        for request in self._state.prefills.revoked(event.session, event.stage) or ():
            if request.incoming is not None:
                request.incoming.stop_writer()
            self._completion.release_if_safe(request)

    def _reject_metadata(self, request: Request, first: FirstToken, now: float) -> bool:
        """Fails a request whose metadata row cannot be of its prompt and model; True if it did."""
        if (prefix := isinstance(request.route, FetchFrom) and request.route.prefix) != (first.finish_reason == PREFIX):
            text = (
                "the server computed a prompt; its prefix cache was asked for" if prefix else "there is no first token"
            )
            self._bad_metadata(request, text, now)
            return True
        vocab, logprob = self._state.engine.vocab_size, first.logprob
        tokens = (first.token, *(logprob.top_ids if logprob is not None else ()))
        wanted = request.submit.sampling.logprobs is not None and not request.preempted
        own = request.target if request.preempted else request.next_position
        if min(tokens) < 0 or (vocab and max(tokens) >= vocab):
            text = f"the prefill server's first token is among {min(tokens)} to {max(tokens)}; there are {vocab}"
        elif first.prompt_tokens != request.target:
            text = f"the prefill server had {first.prompt_tokens} prompt tokens; the prompt has {request.target}"
        elif not 0 <= first.cached_tokens <= request.target:
            text = f"the prefill server had {first.cached_tokens} of {request.target} prompt tokens"
        elif (theirs := first.next_position or first.prompt_tokens) != own:
            text = f"the prefill server goes on at rotary position {theirs}; the images of the prompt say {own}"
        elif wanted and logprob is None:
            text = "the prefill server sent no logprob of the first token, and the request asks for logprobs"
        elif logprob is not None and not all(map(math.isfinite, (logprob.logprob, *logprob.top_logprobs))):
            text = "the prefill server sent a logprob of the first token that is not finite"
        elif first.finish_reason not in FIRST_REASONS and not prefix:
            text = f"the prefill server ended the request for an unknown reason, {first.finish_reason!r}"
        else:
            return False
        self._bad_metadata(request, text, now)
        return True

    def _bad_metadata(self, request: Request, text: str, now: float) -> None:
        error = ErrorInfo(code="bad_metadata", message=text, status=BAD_GATEWAY, at_prefill=True)
        self._completion.fail(request, error, now)

    def _accept_first_token(self, request: Request, first: FirstToken, now: float) -> None:
        # What it computed was computed, whatever was found here.
        request.cached_tokens, request.from_tiers = first.cached_tokens, first.from_tiers
        wanted = request.submit.sampling.logprobs is not None
        sampled = SampledToken(request.serial, first.token, first.logprob if wanted else None)
        self._generation.accept_token(request, sampled, now, first.finish_reason)

    def _fetching(self, serial: int) -> tuple[Request, IncomingTransfer] | tuple[None, None]:
        request = self._state.requests.by_serial(serial)
        if request is None or request.phase is not Phase.FETCHING or request.incoming is None or request.computes_here:
            return None, None
        return request, request.incoming

    def _end_ticket(self, event: TicketFailed | TicketFinished | TicketCancelled) -> Request | None:
        """The prefill server has ended a ticket, and writes nothing more for it. Returns its request if it is live."""
        request = self._state.prefills.fetched((event.session, event.ticket, event.generation))
        if request is None or request.incoming is None:
            self._state.drop("unknown_ticket")
            return None
        request.incoming.end()
        if not request.ended:
            return request
        self._completion.release_if_safe(request)
        return None


def _hash_wanted(request: Request, route: FetchFrom) -> str:
    """The hash that the prefill server has to find its prompt to have; "": none, as the prompt comes from here."""
    if request.preempted:
        return prompt_hash(request.packed(0, request.target))
    return request.prompt_hash if route.posting != "local" or request.terms.image_digest else ""


def _first_token_forbidden(request: Request, first: FirstToken) -> bool:
    """Whether the first token would end the text before min_tokens, which a router that posted the prompt may not have
    passed on. The front end then has the prompt computed here."""
    route, sampling = request.route, request.submit.sampling
    posted_by_router = isinstance(route, FetchFrom) and route.posting != "local"
    return posted_by_router and sampling.min_tokens > 0 and first.token in sampling.stop_token_ids
