"""Admission: a Submit becomes a request in the queues, or is refused with a typed error."""

from msgspec.structs import replace

from headrace.core.messages.frontend import Submit
from headrace.core.messages.peers import AskRenew
from headrace.core.messages.replies import PrefillDecided, Promised, RequestFailed
from headrace.core.types import refusals
from headrace.core.types.errors import CANCELLED, PREFILL_NEEDED, TICKET_IN_USE, TOO_LONG, ErrorInfo
from headrace.core.types.packed import ITEM_BYTES, packed_length, unpack
from headrace.core.types.requests.remote_prefill import LocalForecast, decide, threshold_of
from headrace.core.types.requests.request import DecodeHere, Discard, FetchFrom, SendTo
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.costs.short_passes import open_target
from headrace.scheduler.lifecycle.completion import Completion, release_ticket
from headrace.scheduler.overload import Overload
from headrace.scheduler.prefill.prefix_handover import PrefixHandover
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.promises.recent import RecentArrival
from headrace.scheduler.queues.deadlines import RequestTimer
from headrace.scheduler.requests.parts import QueueEntry, TtftPromise
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Binding, Replica, bind
from headrace.scheduler.state.state import State
from headrace.scheduler.state.ttft_prediction import Prediction
from headrace.scheduler.telemetry.metrics import ADMISSION


class Admission:
    """Checks new requests. A check costs no more than one pass over the prompt."""

    def __init__(self, state: State, completion: Completion, rendezvous: Rendezvous, handover: PrefixHandover) -> None:
        self._state = state
        self._completion = completion
        self._rendezvous = rendezvous
        self._handover = handover
        self._overload = Overload(state)
        self._used_at: dict[str, float] = {}  # when a prompt was last compared and went there, by --prefill

    def submit(self, submit: Submit, now: float) -> None:
        """Admit a request, or refuse it for the first reason found."""
        error = self._unavailable(submit) or _invalid_value(submit) or self._no_replica(submit) or self._in_use(submit)
        if error is not None:
            self._refuse(submit, error)
            return
        if submit.follows:
            self._completion.share(submit.follows)
        submit, (index, cached) = self._placed(submit, now)
        replica = self._state.replicas[index]
        waits = not (submit.moved or submit.open or _from_cache(submit))
        full = self._overload.full(submit) if waits else None
        error = self._misfit(submit, replica) or full or self._no_prefill(submit, index)
        error = error or self._held_too_many(submit, replica) or self._abandoned(submit, now)
        if error is not None:
            self._refuse(submit, error)
        elif isinstance(submit.route, FetchFrom) or submit.open:
            self._admit(submit, replica, now)
        elif _from_cache(submit):
            self._handover.start(self._admit(submit, replica, now), now)
        else:
            self._admit_or_predict_late(submit, replica, cached, now)

    def _placed(self, submit: Submit, now: float) -> tuple[Submit, Binding]:
        """The request with the route by which its prompt costs least, if it is to be compared, and its replica."""
        route = submit.route
        binding = self._most_held(submit) if route.moves_cached else self._bind(submit)
        if not isinstance(route, FetchFrom) or not route.compare:
            return submit, binding
        here = replace(submit, route=DecodeHere())
        local = self._bind(here)
        used_at = self._used_at.setdefault(route.prefill, now)
        forecast = self._forecast(here, local, now)
        decision = decide(forecast, route.forecast, threshold_of(submit.rid), now - used_at)
        if decision.remote:
            self._used_at[route.prefill] = now
        self._state.metrics.counters.add("prefill_decisions_total", labels=(decision.reason,))
        self._state.out.add(PrefillDecided(rid=submit.rid, decision=decision))
        return (submit, binding) if decision.remote else (here, local)

    def _forecast(self, submit: Submit, binding: Binding, now: float) -> LocalForecast | None:
        """What computing a prompt here is expected to take; None while the cost model predicts no seconds."""
        replica = self._state.replicas[binding.replica]
        if not replica.costs.trusted:
            return None
        cached = replica.queues.cached(submit) if binding.cached is None else binding.cached
        length = packed_length(submit.prompt)
        load = Load.between(cached, length)
        prediction = replica.predictor.predict(submit.terms.priority, submit.terms.slo_ttft_s, load, cached, now)
        work_s = replica.costs.load_s(load)
        delayed = replica.delayed(prediction, work_s, now)
        return LocalForecast(prediction.ttft_s, work_s, delayed, cached / length)

    def _bind(self, submit: Submit) -> Binding:
        """The replica of a new request. One whose peer has not reserved is bound again once it has."""
        requests = self._state.requests
        left = requests.left(submit.follows or submit.rid) or requests.live(submit.follows)
        return bind(
            self._state.replicas,
            submit.prompt,
            submit.terms.prefix_salt,
            submit.images,
            pinned=submit.terms.replica if left is None else left.replica,
            cacheable=submit.sampling.cacheable(packed_length(submit.prompt)),
            to_fetch=isinstance(submit.route, FetchFrom),
            open_prompt=submit.open,
        )

    def _most_held(self, submit: Submit) -> Binding:
        """The replica that has most of the tokens, tiers included; as for a new request if none has any."""
        replicas = self._state.replicas
        held = (one.cache.held(submit.prompt, submit.terms.prefix_salt, submit.images) for one in replicas)
        found = [pool + in_tiers.total for pool, in_tiers in held]
        return Binding(found.index(max(found)), None) if any(found) else self._bind(submit)

    def _admit_or_predict_late(self, submit: Submit, replica: Replica, cached: int | None, now: float) -> None:
        """The request is to be computed here: predict when, and refuse it if that is too late.

        cached: positions that the prefix cache has of the prompt; None: it was not looked up."""
        cached = replica.queues.cached(submit) if cached is None else cached
        if (error := _uncached(submit, cached)) is not None:
            self._refuse(submit, error)
            return
        load = Load.between(cached, packed_length(submit.prompt))
        prediction = replica.predictor.predict(submit.terms.priority, submit.terms.slo_ttft_s, load, cached, now)
        promise = self._promise(submit, replica, load, prediction, now)
        error = self._overload.too_late(submit, replica, prediction, promise)
        admitted = error is None
        replica.predictor.arrived(submit.terms.priority, submit.terms.slo_ttft_s, load, now, admitted=admitted)
        if error is not None:
            self._refuse(submit, error)
            return
        request = self._admit(submit, replica, now, cached)
        request.predicted_ttft_s = prediction.ttft_s
        self._state.metrics.histograms.observe("predicted_ttft_seconds", prediction.ttft_s)
        if promise is not None and not request.ended:
            self._state.promises.promised(request, promise)
            self._state.out.add(Promised(rid=request.rid, bound_s=promise.bound_s))

    def _promise(
        self, submit: Submit, replica: Replica, load: Load, prediction: Prediction, now: float
    ) -> TtftPromise | None:
        """The bound that a request would be promised; None where nothing is promised, or not yet."""
        promises = self._state.promises
        if not promises or not load.tokens:
            return None
        terms, route = submit.terms, submit.route
        max_tokens = submit.sampling.max_tokens if route.decodes_here else 1
        sends = isinstance(route, SendTo)
        promises.arrived(RecentArrival(now, load, terms.priority, terms.slo_ttft_s, terms.tenant, sends, max_tokens))
        return promises.bound(replica.costs.load_s(load), prediction.ttft_s) if replica.costs.trusted else None

    def _admit(self, submit: Submit, replica: Replica, now: float, cached: int | None = None) -> Request:
        """cached: positions that the prefix cache has of the prompt; None: it was not looked up."""
        state, route = self._state, submit.route
        early_prefill = _from_cache(submit) or self._held_for_later(submit) or self._optimistic(submit, replica)
        waits = isinstance(route, SendTo) and not early_prefill
        request = Request(
            submit=submit,
            arrival=state.requests.new_arrival(),
            serial=state.requests.new_serial(),
            arrived=now,
            token_limit=self._token_limit(submit),
            phase=Phase.BOOTSTRAP if waits else Phase.WAITING,
            replica=replica.index,
            early_prefill=early_prefill,
            queued=QueueEntry() if cached is None else QueueEntry(cached, replica.cache.tree_version),
        )
        if request.open:
            request.target = open_target(state.config, request.length)
        state.requests.add(request)
        state.digests.add(request)
        replica.queues.admit(request, now)
        if route.moves_cached:
            replica.moves[request.arrival] = request
        if submit.terms.deadline_s is not None:
            state.deadlines.set(RequestTimer(request.arrival), now + submit.terms.deadline_s)
        if isinstance(route, SendTo):
            self._rendezvous.submitted(request, route, now)
        elif isinstance(route, FetchFrom):
            server = state.prefills.attach(request, route)
            if route.posting != "local" and (session := server.session(replica.index)):
                state.out.add(AskRenew(session=session, ticket=route.ticket))
        return request

    def _held_for_later(self, submit: Submit) -> bool:
        """The client asks to have it computed, or what is cached kept, before a peer reserves, and none has."""
        route = submit.route
        if not isinstance(route, SendTo) or not (route.hold or route.cached):
            return False
        return self._state.tickets.early(route.ticket) is None

    def _optimistic(self, submit: Submit, replica: Replica) -> bool:
        """It may be computed while its peer gets ready, since there is room for that."""
        state, route = self._state, submit.route
        if not state.config.optimistic_start or not isinstance(route, SendTo):
            return False
        return state.tickets.early(route.ticket) is None and replica.held.fits(
            packed_length(submit.prompt), submit.terms.tenant
        )

    def _token_limit(self, submit: Submit) -> int:
        """Prompt and generated tokens together: max_tokens, clipped by the room that the model leaves."""
        wanted = packed_length(submit.prompt) + submit.sampling.max_tokens
        limit = self._state.config.max_model_len
        return min(wanted, limit) if limit else wanted

    def _refuse(self, submit: Submit, error: ErrorInfo) -> None:
        """Answer the client, and tell the server that waits for the other half of the ticket."""
        state = self._state
        state.metrics.failed(ADMISSION, error)
        state.out.add(RequestFailed(rid=submit.rid, error=error))
        match submit.route:
            case SendTo(ticket=ticket) if ticket:
                self._rendezvous.refuse(ticket, error)
            case FetchFrom(prefill=prefill, ticket=ticket, posting="external" | "done") if ticket:
                release_ticket(state, prefill, ticket, error.message)

    def _unavailable(self, submit: Submit) -> ErrorInfo | None:
        if self._state.draining and not submit.moved:
            return refusals.DRAINING.error()
        if not self._state.engine.ready:
            return refusals.NOT_READY.error()
        return None

    def _no_replica(self, submit: Submit) -> ErrorInfo | None:
        replica, dp = submit.terms.replica, self._state.config.dp
        return None if replica is None or 0 <= replica < dp else no_replica(replica, dp)

    def _in_use(self, submit: Submit) -> ErrorInfo | None:
        if self._state.requests.live(submit.rid) is not None:
            return ErrorInfo(code="rid_in_use", message=f"request {submit.rid} is active", status=409, field="rid")
        route = submit.route
        if isinstance(route, SendTo) and self._state.tickets.holder(route.ticket) is not None:
            text = f"ticket {route.ticket} is used by another request"
            return ErrorInfo(code=TICKET_IN_USE, message=text, status=409, field="ticket")
        return None

    def _misfit(self, submit: Submit, replica: Replica) -> ErrorInfo | None:
        """The prompt does not fit the model or the pool."""
        state = self._state
        length, limit = packed_length(submit.prompt), state.config.max_model_len
        if limit and length + 1 > limit:
            return _too_long(f"the prompt has {length} tokens; with one generated token the limit is {limit}")
        pages, held = replica.cache.pages_for(length), replica.held.limit
        if pages > (total := replica.cache.total):
            return _too_long(f"the prompt of {length} tokens needs {pages} KV pages; the pool has {total}")
        if isinstance(submit.route, FetchFrom) and submit.route.prefix and replica.cache.has_states:
            text = "this model's requests have states, which a prefix of pages is without: it cannot be fetched"
            return ErrorInfo(code="unsupported", message=text, status=400, field="prompt")
        if isinstance(submit.route, SendTo) and submit.route.hold and pages > held:
            return _too_long(f"the prompt of {length} tokens needs {pages} KV pages; {held} may be held for later")
        ids = unpack(submit.prompt)
        lowest, highest, vocab = min(ids), max(ids), state.engine.vocab_size
        if lowest < 0 or (vocab and highest >= vocab):
            text = f"token id {lowest if lowest < 0 else highest} is outside the vocabulary of {vocab}"
            return ErrorInfo(code="invalid_token", message=text, status=400, field="prompt")
        return None

    def _held_too_many(self, submit: Submit, replica: Replica) -> ErrorInfo | None:
        held, length = replica.held, packed_length(submit.prompt)
        if not self._held_for_later(submit) or held.fits(length, submit.terms.tenant):
            return None
        pages = replica.cache.pages_for(length)
        return refusals.HELD_PAGES.error(held=held.pages, pages=pages, limit=held.limit)

    def _abandoned(self, submit: Submit, now: float) -> ErrorInfo | None:
        """A peer has said that no peer will reserve the ticket."""
        route = submit.route
        reason = self._state.tickets.pop_abandoned(route.ticket, now) if isinstance(route, SendTo) else None
        return None if reason is None else ErrorInfo(code=CANCELLED, message=reason, status=499)

    def _no_prefill(self, submit: Submit, replica: int) -> ErrorInfo | None:
        if not isinstance(submit.route, FetchFrom):
            return None
        name = submit.route.prefill
        if self._state.prefills.session(name, replica) is not None:
            return None
        return no_prefill(name, "unknown" if self._state.prefills.get(name) is None else "down")


def _from_cache(submit: Submit) -> bool:
    """Nothing is to be computed for it."""
    return isinstance(submit.route, SendTo) and submit.route.cached


def no_prefill(name: str, why: str) -> ErrorInfo:
    """The error of a request whose prefill server is unknown or down."""
    return refusals.SESSION_DOWN.error(at_prefill=True, name=name, why=why)


def no_replica(replica: int, dp: int) -> ErrorInfo:
    """The error of a request for a data-parallel replica that is not one of the dp of this server."""
    text = f"there is no data-parallel rank {replica}; this server has {dp}, numbered from 0"
    return ErrorInfo(code="invalid_value", message=text, status=400, field="data_parallel_rank")


def _uncached(submit: Submit, cached: int) -> ErrorInfo | None:
    """The client wants it only if most of its prompt is in the prefix cache. cached: positions that are."""
    limit, uncached = submit.terms.uncached_limit, packed_length(submit.prompt) - cached
    if limit is None or uncached < limit:
        return None
    text = (
        f"{uncached} tokens of the prompt are not in the prefix cache; with Prefer: if-available it has to be less "
        f"than {limit}. Have a prefill server compute it, and send kv_transfer_params"
    )
    return ErrorInfo(code=PREFILL_NEEDED, message=text, status=412)


def _too_long(text: str) -> ErrorInfo:
    return ErrorInfo(code=TOO_LONG, message=text, status=400, field="prompt")


def _invalid_value(submit: Submit) -> ErrorInfo | None:
    """Values that the types allow and no request can have. The front end refuses them before."""
    if not submit.prompt or len(submit.prompt) % ITEM_BYTES:
        field, text = "prompt", "the prompt has to have at least one token"
    elif submit.sampling.max_tokens < 1:
        field, text = "max_tokens", f"max_tokens is {submit.sampling.max_tokens}; it has to be at least 1"
    elif isinstance(submit.route, SendTo | FetchFrom) and not submit.route.ticket:
        field, text = "ticket", "a handoff needs a ticket"
    elif submit.open and not isinstance(submit.route, Discard):
        field, text = "open", "a piece of an open prompt is computed here, and goes nowhere"
    else:
        return None
    return ErrorInfo(code="invalid_value", message=text, status=400, field=field)
