"""Admission: a Submit becomes a record, or is refused with a typed error."""

from headrace.core.messages.frontend import RequestFailed, Submit
from headrace.core.messages.peers import AskRenew
from headrace.core.types.errors import CANCELLED, DRAINING, NOT_READY, QUEUE_FULL, TICKET_IN_USE, TOO_LONG, ErrorInfo
from headrace.core.types.packed import ITEM_BYTES, packed_length, unpack
from headrace.core.types.request import FetchFrom, SendTo
from headrace.scheduler.lifecycle.completion import release
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import State

MIN_RETRY_S = 0.05
HOLD_RETRY_S = 1.0  # peers come within a moment, as a rule


class Admission:
    """Checks cost no more than one pass over the prompt."""

    def __init__(self, state: State, rendezvous: Rendezvous) -> None:
        self._state = state
        self._rendezvous = rendezvous
        self._arrivals = 0

    def submit(self, submit: Submit, now: float) -> None:
        error = self._unavailable() or _invalid_value(submit) or self._in_use(submit) or self._misfit(submit)
        error = error or self._overload(submit) or self._no_prefill(submit) or self._held_too_many(submit)
        error = error or self._unwanted(submit, now)
        if error is not None:
            self._refuse(submit, error)
        else:
            self._admit(submit, now)

    def _admit(self, submit: Submit, now: float) -> None:
        state = self._state
        self._arrivals += 1
        route = submit.route
        early_prefill = self._held_for_later(submit) or self._optimistic(submit)
        request = Request(
            submit=submit,
            arrival=self._arrivals,
            serial=state.new_serial(),
            arrived=now,
            token_limit=self._token_limit(submit),
            phase=Phase.BOOTSTRAP if isinstance(route, SendTo) and not early_prefill else Phase.WAITING,
            early_prefill=early_prefill,
        )
        state.records[request.serial] = state.arrivals[request.arrival] = request
        state.rids[submit.rid] = request
        state.unplanned += request.unplanned
        state.count(request)
        if submit.deadline_s is not None:
            state.deadlines.set(Timer.REQUEST, request.arrival, now + submit.deadline_s)
        if isinstance(route, SendTo):
            self._rendezvous.arrive(request, route, now)
            return
        state.waiting.push(request)
        if isinstance(route, FetchFrom):
            server = state.prefills[route.prefill]
            server.requests[request.arrival] = request
            if route.posting == "done" and server.session:
                state.out.add(AskRenew(session=server.session, ticket=route.ticket))

    def _held_for_later(self, submit: Submit) -> bool:
        """To be computed before its peer comes."""
        route = submit.route
        return isinstance(route, SendTo) and route.hold and route.ticket not in self._state.tickets.early

    def _optimistic(self, submit: Submit) -> bool:
        """To be computed while its peer gets ready, since there is room for that."""
        state, route = self._state, submit.route
        if not state.config.optimistic_start or not isinstance(route, SendTo) or route.ticket in state.tickets.early:
            return False
        return state.held_pages + state.cache.pages_for(packed_length(submit.prompt)) <= state.max_held_pages

    def _token_limit(self, submit: Submit) -> int:
        """Prompt and generated tokens together: max_tokens, clipped by the room that the model leaves."""
        wanted = packed_length(submit.prompt) + submit.sampling.max_tokens
        limit = self._state.config.max_model_len
        return min(wanted, limit) if limit else wanted

    def _refuse(self, submit: Submit, error: ErrorInfo) -> None:
        state = self._state
        state.counters.add("requests_total", labels=("refused", error.code))
        state.out.add(RequestFailed(rid=submit.rid, error=error))
        match submit.route:
            case SendTo(ticket=ticket) if ticket:
                self._rendezvous.refuse(ticket, error)
            case FetchFrom(prefill=prefill, ticket=ticket, posting="external" | "done") if ticket:
                release(state, prefill, ticket, error.message)

    def _unavailable(self) -> ErrorInfo | None:
        if self._state.draining:
            return ErrorInfo(code=DRAINING, message="the server is draining", status=503, retry_after_s=1.0)
        if not self._state.ready:
            return ErrorInfo(code=NOT_READY, message="the server is not ready", status=503, retry_after_s=1.0)
        return None

    def _in_use(self, submit: Submit) -> ErrorInfo | None:
        if submit.rid in self._state.rids:
            return ErrorInfo(code="rid_in_use", message=f"request {submit.rid} is active", status=409, field="rid")
        route = submit.route
        if isinstance(route, SendTo) and self._state.tickets.holder(route.ticket) is not None:
            text = f"ticket {route.ticket} is used by another request"
            return ErrorInfo(code=TICKET_IN_USE, message=text, status=409, field="ticket")
        return None

    def _misfit(self, submit: Submit) -> ErrorInfo | None:
        """What of the prompt does not fit the model or the pool."""
        state = self._state
        length, limit = packed_length(submit.prompt), state.config.max_model_len
        if limit and length + 1 > limit:
            text = f"the prompt has {length} tokens; with one generated token the limit is {limit}"
            return ErrorInfo(code=TOO_LONG, message=text, status=400, field="prompt")
        pages = state.cache.pages_for(length)
        if pages > state.cache.total:
            text = f"the prompt of {length} tokens needs {pages} KV pages; the pool has {state.cache.total}"
            return ErrorInfo(code=TOO_LONG, message=text, status=400, field="prompt")
        if isinstance(submit.route, SendTo) and submit.route.hold and pages > state.max_held_pages:
            text = f"the prompt of {length} tokens needs {pages} KV pages; {state.max_held_pages} may be held for later"
            return ErrorInfo(code=TOO_LONG, message=text, status=400, field="prompt")
        ids = unpack(submit.prompt)
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or (state.vocab_size and highest >= state.vocab_size):
            wrong = lowest if lowest < 0 else highest
            text = f"token id {wrong} is outside the vocabulary of {state.vocab_size}"
            return ErrorInfo(code="invalid_token", message=text, status=400, field="prompt")
        return None

    def _overload(self, submit: Submit) -> ErrorInfo | None:
        """Queue bounds. A prompt larger than the token bound still gets in when nothing else is queued."""
        state = self._state
        length, limit = packed_length(submit.prompt), state.config.max_queued_tokens
        queued = state.queue_requests[Phase.BOOTSTRAP] + state.queue_requests[Phase.WAITING]
        if state.unplanned and state.unplanned + length > limit:
            text = f"{state.unplanned} prompt tokens are queued; {length} more exceed the limit of {limit}"
        elif queued >= state.config.max_queued_requests:
            text = f"{queued} requests are queued, which is the limit"
        else:
            return None
        excess = max(1, min(state.unplanned, state.unplanned + length - limit))
        retry = max(MIN_RETRY_S, round(state.rate.seconds_for(excess), 3))
        return ErrorInfo(code=QUEUE_FULL, message=text, status=429, retry_after_s=retry)

    def _held_too_many(self, submit: Submit) -> ErrorInfo | None:
        state = self._state
        pages, limit = state.cache.pages_for(packed_length(submit.prompt)), state.max_held_pages
        if not self._held_for_later(submit) or state.held_pages + pages <= limit:
            return None
        text = f"{state.held_pages} KV pages are held for peers that have not come; {pages} more exceed {limit}"
        return ErrorInfo(code=QUEUE_FULL, message=text, status=429, retry_after_s=HOLD_RETRY_S)

    def _unwanted(self, submit: Submit, now: float) -> ErrorInfo | None:
        """A peer has said that it will not come."""
        route = submit.route
        reason = self._state.tickets.pop_abandoned(route.ticket, now) if isinstance(route, SendTo) else None
        return None if reason is None else ErrorInfo(code=CANCELLED, message=reason, status=499)

    def _no_prefill(self, submit: Submit) -> ErrorInfo | None:
        if not isinstance(submit.route, FetchFrom):
            return None
        name = submit.route.prefill
        server = self._state.prefills.get(name)
        if server is not None and server.session is not None:
            return None
        return no_prefill(name, "unknown" if server is None else "down")


def no_prefill(name: str, why: str) -> ErrorInfo:
    return ErrorInfo(code="no_prefill", message=f"prefill server {name} is {why}", status=503, retry_after_s=1.0)


def _invalid_value(submit: Submit) -> ErrorInfo | None:
    """Values that the types allow and no request can have. The front end refuses them before."""
    if not submit.prompt or len(submit.prompt) % ITEM_BYTES:
        field, text = "prompt", "the prompt has to have at least one token"
    elif submit.sampling.max_tokens < 1:
        field, text = "max_tokens", f"max_tokens is {submit.sampling.max_tokens}; it has to be at least 1"
    elif isinstance(submit.route, SendTo | FetchFrom) and not submit.route.ticket:
        field, text = "ticket", "a handoff needs a ticket"
    else:
        return None
    return ErrorInfo(code="invalid_value", message=text, status=400, field=field)
