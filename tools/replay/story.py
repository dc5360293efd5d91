"""Why a request took as long as it did: every decision that touched it and what it waited for, in sentences.

A recording is played, and what each call has changed of the request is told: by its event, its effects, and the state
before and after it. Passes that go by without it are told together, as long as the reason stays the same.
"""

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from headrace.core.incoming import IncomingState
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import AnyOrder, Forward, PlanRow, ReplicaOrder, SendChunk
from headrace.core.messages.replies import Held, PrefillDecided, RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import PlanDone
from headrace.core.types.errors import ConfigError, ErrorInfo, first_of
from headrace.core.types.packed import packed_length
from headrace.core.types.requests.request import AnyRoute, DecodeHere, FetchFrom, SendTo
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.cost_model import NOTHING
from headrace.scheduler.recording.file import Recording
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.scheduler import Effect, Event
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State
from headrace.tools.replay import waits
from headrace.tools.replay.playback import Playback, PlayedCall
from headrace.tools.replay.words import brief, counted, short

MOST_NAMED = 3
NEAR = 5
LONG_GAP = 3  # times the median between two tokens, from which on the longest gap is told


class Noted(NamedTuple):
    """What was noted of the request before a call."""

    phase: Phase
    serial: int
    replica: int
    pages: int
    """Of its lease; 0 without one."""

    reserved: bool
    """A decode server has reserved."""

    awaits_row: bool
    preempting: bool
    asked: bool
    """The prefill server was asked for its KV."""

    loading: bool


@dataclass(slots=True, eq=False)
class SharedPass:
    """A pass with a part of the prompt."""

    ordered: float
    row: PlanRow
    others: str
    seconds: list[float] = field(default_factory=list)
    """Of computing, by stage."""


@dataclass(slots=True, eq=False)
class PassedOver:
    """Passes that went by without the request, for one reason."""

    reason: waits.WaitReason
    since: float
    until: float
    passes: int = 0
    tokens: int = 0
    others: Counter[str] = field(default_factory=Counter)
    """Tokens by request."""


class SentChunk(NamedTuple):
    """KV on its way to a decode server."""

    start: int
    tokens: int
    ordered: float
    peer: str


def find(recording: Recording, asked: str) -> str:
    """The id of a request of a recording, given whole or by a beginning that no other has. Raises ConfigError, which
    names near ones."""
    names: dict[str, None] = {}
    for request in Playback(recording).scheduler.state.requests:
        names[request.rid] = None
    for segment in recording.segments:
        for call in segment.calls:
            if isinstance(call.event, Submit):
                names[call.event.rid] = None
    if asked in names:
        return asked
    begun = [name for name in names if name.startswith(asked)]
    if asked and len(begun) == 1:
        return begun[0]
    near = begun[:NEAR] or difflib.get_close_matches(asked, list(names), NEAR, 0.5)
    hint = f"near ones: {', '.join(map(short, near))}" if near else f"there are {len(names):,}"
    if not near and names:
        hint += f": {first_of([short(name) for name in names], MOST_NAMED)}"
    raise ConfigError(f"the recording has no request {short(asked)!r}; {hint}")


def tell(playback: Playback, rid: str) -> str:
    """The story of a request in the calls that are left."""
    story = _Story(rid, playback)
    for step in playback:
        story.look(step)
    return story.text()


class _Story:
    """Gathers the sentences about one request, while a recording is played."""

    def __init__(self, rid: str, playback: Playback) -> None:
        self._rid = rid
        self._playback = playback
        self._lines: list[tuple[float, str]] = []
        self._noted: Noted | None = None
        self._arrival: int | None = None  # number of the request
        self._arrived: float | None = None
        self._tokens = 0  # of its prompt
        self._passes: dict[int, SharedPass] = {}  # by number, those that are not done
        self._over: PassedOver | None = None
        self._chunks: dict[int, SentChunk] = {}
        self._first: float | None = None
        self._token_times: list[float] = []
        self._companions: list[int] = []  # rows of the passes in which it decoded
        self._record: Request | None = None  # as it was last seen
        self._end: tuple[float, str] | None = None
        request = self._state.requests.live(rid)
        if request is not None:
            self._record = request
            self._found(request)

    @property
    def _state(self) -> State:
        return self._playback.scheduler.state

    def look(self, step: PlayedCall) -> None:
        """A call was applied."""
        now, event = step.call.now, step.call.event
        if step.raised:
            self._say(now, f"the scheduler raises an exception: {step.raised}")
            return
        request = self._request()
        self._record = request or self._record
        if event is not None:
            self._event(event, step.effects, request, now)
        if request is not None:
            self._changes(request, now)
        for effect in step.effects:
            self._effect(effect, request, now)
        if self._record is not None:
            self._acknowledged(self._record, now)

    def text(self) -> str:
        """All sentences, with the times at which what they say began."""
        request = self._request()
        now = self._playback.now
        self._flush()
        self._told_tokens()
        for number, shared in self._passes.items():
            self._say(
                shared.ordered, f"{_computes(number, shared, self._tokens)}; it is not done when the recording ends"
            )
        for number, chunk in self._chunks.items():
            self._say(chunk.ordered, f"{_chunk(number, chunk)}; it was not acknowledged")
        if request is not None and not request.ended:
            waited, why = now - request.since, waits.reason(self._state, request).text
            state = "generating" if request.phase is Phase.GENERATING else f"{request.phase.value}: {why}"
            self._say(now, f"the recording ends; for {waited:.3f} s it has been {state}")
        elif request is not None:
            stages = first_of([str(stage) for stage in sorted(request.on_stages.stopping)])
            self._say(now, f"the recording ends; its pages are kept until stages {stages} have answered")
        lines = sorted(self._lines, key=lambda line: line[0])
        told = [f"{self._playback.since(at):9.3f} s  {text}" for at, text in lines]
        return "\n".join([self._title(), *told])

    def _title(self) -> str:
        parts = [f"{short(self._rid)}: a prompt of {self._tokens:,} tokens"]
        if self._arrived is not None and self._first is not None:
            parts.append(f"first token after {self._first - self._arrived:.3f} s")
        if self._end is not None and self._arrived is not None:
            parts.append(f"{self._end[1]} after {self._end[0] - self._arrived:.3f} s")
        else:
            parts.append("open at the end of the recording")
        spent = {} if self._record is None else dict(self._record.spent)
        phases = [f"{phase.value} {seconds:.3f} s" for phase, seconds in spent.items() if seconds]
        return "; ".join(parts) + (f"\nphases: {', '.join(phases)}" if phases else "")

    def _say(self, at: float, text: str) -> None:
        self._lines.append((at, text))

    def _request(self) -> Request | None:
        """Its record, until its pages are free."""
        requests = self._state.requests
        found = requests.live(self._rid)
        if found is None and self._arrival is not None:
            found = requests.by_arrival(self._arrival)
        return found

    def _found(self, request: Request) -> None:
        """It is here, and was before the recording began."""
        self._arrival, self._arrived, self._tokens = request.arrival, request.arrived, request.prompt_tokens
        began = self._playback.began
        done = f"{min(request.computed, self._tokens):,} of {self._tokens:,} tokens are computed"
        text = f"it was here before: it arrived {began - request.arrived:.3f} s earlier, {done}"
        self._say(began, f"{text}; it is {request.phase.value} since {began - request.since:.3f} s")
        self._noted = _note(self._state, request)
        if request.phase in (Phase.BOOTSTRAP, Phase.WAITING):
            self._say(began, self._waiting(request, began))

    # Events.

    def _event(self, event: Event, effects: list[Effect], request: Request | None, now: float) -> None:
        match event:
            case Submit(rid=self._rid):
                self._arrives(event, request, now)
            case Abort(rid=self._rid, error=None, finish=finish):
                self._say(now, "its client has all that it wants of it" if finish else "its client cancels it")
            case Abort(rid=self._rid, error=ErrorInfo(message=message)):
                self._say(now, f"the front end gives it up: {short(message)}")
            case PlanDone():
                self._pass_done(event, now)
            case _:
                pass

    def _arrives(self, submit: Submit, request: Request | None, now: float) -> None:
        self._tokens = packed_length(submit.prompt)
        self._arrived = now if self._arrived is None else self._arrived
        limit = submit.sampling.max_tokens
        text = f"arrives: {self._tokens:,} tokens, {_route(submit.route, limit)}{_terms(submit.terms)}"
        self._say(now, f"{text}{'; it was at another prefill server before' if submit.moved else ''}")
        if request is None:
            return
        self._arrival, self._noted = request.arrival, None
        replicas = self._state.replicas
        if len(replicas) > 1:
            self._say(now, _bound(request, replicas))
        if request.queued.expected_cached:
            self._say(now, f"{request.queued.expected_cached:,} of its tokens are in the prefix cache")
        if request.predicted_ttft_s is not None and self._state.costs_trusted:
            self._say(now, f"its first token is predicted for {request.predicted_ttft_s:.3f} s from now")

    def _pass_done(self, event: PlanDone, now: float) -> None:
        shared = self._passes.get(event.seq)
        if shared is None or self._noted is None:
            return
        replica = self._state.replicas[self._noted.replica]
        if event.stage not in replica.ranks:
            return
        shared.seconds.append(event.duration_s)
        if event.stage == replica.sampler:
            del self._passes[event.seq]
            computing = ", ".join(f"{1000 * seconds:.1f}" for seconds in shared.seconds)
            done = f"done {now - shared.ordered:.3f} s later, after {computing} ms of computing"
            self._say(shared.ordered, f"{_computes(event.seq, shared, self._tokens)}; {done}")

    # What a call has changed.

    def _changes(self, request: Request, now: float) -> None:
        before, note = self._noted, _note(self._state, request)
        self._noted = note
        if before is None:
            self._entered(request, None, now)
            return
        if note.preempting and not before.preempting and not request.ended and not request.open:
            why = self._preempted(request, before)
            self._say(now, f"it has to give up its {before.pages:,} pages when its passes are done: {why}")
        if note.serial != before.serial:
            why = "" if before.preempting else f", as {self._preempted(request, before)}"
            self._say(now, f"it gives up its {before.pages:,} pages{why}, and waits again{self._kept(request)}")
        if note.replica != before.replica:
            self._say(now, _bound(request, self._state.replicas))
        if note.reserved and not before.reserved and not request.ended:
            self._say(now, f"{self._peer(request)} has reserved pages of its own for it")
        if note.awaits_row and not before.awaits_row:
            self._say(now, "it waits for a metadata row before its KV can be sent")
        elif before.awaits_row and not note.awaits_row and request.row is not None:
            self._say(now, f"it gets metadata row {request.row}")
        if note.asked and not before.asked:
            self._say(now, f"all stages are ready to receive: pages are reserved at {self._peer(request)}")
        if before.loading and not note.loading and note.pages:
            self._say(now, "its pages were loaded from the tier")
        if note.phase is not before.phase or note.serial != before.serial:
            self._entered(request, before, now)
        elif request.ended and before.pages and not note.pages:
            self._freed(before, now)

    def _entered(self, request: Request, before: Noted | None, now: float) -> None:
        """It is in another phase."""
        self._flush()
        lease, size = request.lease, self._state.config.page_size
        match request.phase:
            case Phase.BOOTSTRAP | Phase.WAITING:
                self._say(now, self._waiting(request, now))
            case Phase.RUNNING if lease is not None:
                cached = f", {lease.matched * size:,} tokens of them cached" if lease.matched else ""
                self._say(now, f"it is started: it gets {len(lease.pages):,} pages{cached}")
                if lease.load is not None:
                    self._say(now, "some of these pages are in a tier, and are loaded first")
            case Phase.FETCHING if lease is not None:
                cached = f", {lease.matched * size:,} tokens of them cached here" if lease.matched else ""
                peer = self._peer(request)
                self._say(now, f"it gets {len(lease.pages):,} pages{cached}; its KV is to come from {peer}")
            case Phase.INFLIGHT:
                self._say(now, f"its prompt is computed: {self._sending(request)}")
            case Phase.GENERATING:
                self._say(now, "it decodes from now on")
            case Phase.DONE | Phase.FAILED if before is not None and before.pages and lease is None:
                self._noted = _note(self._state, request)
            case _:
                pass

    def _waiting(self, request: Request, now: float) -> str:
        """What it waits behind."""
        if request.phase is Phase.BOOTSTRAP or not self._state.engine.ready:
            return f"it waits: {waits.reason(self._state, request).text}"
        queues = self._state.of(request).queues
        queue = queues.to_fetch if request.to_fetch else queues.open if request.open else queues.policy
        ranked = queue.ranked(now)
        if request not in ranked:
            return "it waits to be handed over from the prefix cache"
        ahead = ranked[: ranked.index(request)]
        what = "to be fetched" if request.to_fetch else "to be computed"
        if not ahead:
            return f"it waits {what}, as the first in the queue"
        tokens = sum(other.work.tokens for other in ahead)
        named = first_of([f"{brief(each.rid)} ({each.work.tokens:,})" for each in ahead], MOST_NAMED)
        return f"it waits {what}, behind {counted(len(ahead), 'request')} with {counted(tokens, 'token')} left: {named}"

    def _preempted(self, request: Request, before: Noted) -> str:
        """For whom it gives up its pages."""
        if before.phase is Phase.GENERATING or request.decodes_here:
            return "the pool is full, and of those that decode it has come last"
        first = next(
            (
                one
                for one in self._state.of(request).queues.policy.ranked(self._playback.now)
                if one.phase is Phase.WAITING
            ),
            None,
        )
        whom = f"{brief(first.rid)}, whose decode server has" if first is not None else "another prompt"
        return f"{whom}, needs them, and its own decode server has not reserved"

    def _kept(self, request: Request) -> str:
        if not (request.kept and self._state.config.prefix_cache):
            return ""
        return f"; the KV of {request.kept:,} tokens stays in the prefix cache while there is room"

    def _sending(self, request: Request) -> str:
        if request.outgoing is not None:
            return f"the rest of its KV goes to {self._peer(request)}"
        return "its KV is held until a decode server reserves it"

    def _freed(self, before: Noted, now: float) -> None:
        if self._end is not None and now > self._end[0]:
            self._say(now, f"its {before.pages:,} pages are free again: nothing reads or writes them any more")

    def _peer(self, request: Request) -> str:
        return short(self._state.peer_of(request)) or "its peer"

    # Effects.

    def _effect(self, effect: Effect, request: Request | None, now: float) -> None:
        match effect:
            case ReplicaOrder(replica=replica, order=order):
                self._order(order, replica, request, now)
            case Forward() | SendChunk():
                self._order(effect, 0, request, now)
            case PrefillDecided(rid=self._rid, decision=decision):
                where = "by the prefill server" if decision.remote else "here"
                self._say(now, f"it is to be computed {where} ({decision.reason})")
            case Tokens(rid=self._rid, tokens=tokens):
                self._token_times += [now] * len(tokens)
                if self._first is None:
                    self._first = now
                    after = "" if self._arrived is None else f", {now - self._arrived:.3f} s after its arrival"
                    self._say(now, f"its first token is known{after}")
            case Held(rid=self._rid, lease_s=lease_s) if lease_s:
                self._say(now, f"a decode server has {lease_s:g} s to reserve it, or to renew that")
            case RequestFinished(rid=self._rid, reason=reason):
                self._ended(now, f"finished ({reason})", f"it has finished: {_ENDS.get(reason, reason)}")
            case RequestFailed(rid=self._rid, error=error) if error.code != "rid_in_use":
                again = f"; it may come again in {error.retry_after_s:g} s" if error.retry_after_s else ""
                verb = "is refused" if self._noted is None else "has failed"
                text = f"it {verb}: {short_sentence(error.message)} ({error.code}, HTTP {error.status}){again}"
                self._ended(now, f"{verb.split()[-1]} ({error.code})", text)
            case _:
                pass

    def _ended(self, now: float, how: str, text: str) -> None:
        self._flush()
        self._told_tokens()
        self._end = now, how
        self._say(now, text)

    def _order(self, order: AnyOrder, replica: int, request: Request | None, now: float) -> None:
        if request is None or request.replica != replica:
            return
        if isinstance(order, SendChunk) and order.request == request.serial:
            self._chunks[order.chunk] = SentChunk(order.start, order.count, now, self._peer(request))
        elif isinstance(order, Forward):
            row = next((row for row in order.rows if row.request == request.serial), None)
            if row is None:
                self._passed(order, request, now)
            elif row.generated and row.count == 1:
                self._flush()
                self._companions.append(len(order.rows))
            else:
                self._flush()
                self._passes[order.seq] = SharedPass(now, row, self._others(order, row))

    def _passed(self, order: Forward, request: Request, now: float) -> None:
        """A pass of its replica was ordered without it, although it waits."""
        half_done = request.phase is Phase.RUNNING and request.planned < request.target
        if not order.rows or not (request.phase is Phase.WAITING or half_done):
            return
        tokens = sum(row.count for row in order.rows)
        found = waits.reason(self._state, request, tokens, len(order.rows))
        if self._over is None or self._over.reason.kind != found.kind:
            self._flush()
            self._over = PassedOver(found, now, now)
        over = self._over
        over.until, over.passes, over.tokens = now, over.passes + 1, over.tokens + tokens
        for row in order.rows:
            over.others[brief(self._playback.name_of(row.request) or "?")] += row.count

    def _flush(self) -> None:
        """Tell of the passes that went by."""
        over, self._over = self._over, None
        if over is None:
            return
        named = first_of([f"{rid} ({tokens:,})" for rid, tokens in over.others.most_common()], MOST_NAMED)
        passes = "a pass goes" if over.passes == 1 else f"{over.passes:,} passes go"
        until = "" if over.passes == 1 else f", until {self._playback.since(over.until):.3f} s"
        self._say(over.since, f"{passes} by without it{until}, since {over.reason.text}; computed there: {named}")

    def _others(self, order: Forward, own: PlanRow) -> str:
        """The rows of a pass beside its own."""
        prefills = [row for row in order.rows if row is not own and not (row.generated and row.count == 1)]
        decoding = len(order.rows) - len(prefills) - 1
        names = [f"{brief(self._playback.name_of(row.request) or '?')} ({row.count:,})" for row in prefills]
        parts = [first_of(names, MOST_NAMED)] if names else []
        parts += [f"{decoding} that decode"] if decoding else []
        return f", beside {' and '.join(parts)}" if parts else ", alone"

    def _acknowledged(self, request: Request, now: float) -> None:
        """Chunks that every stage of the decode server has acknowledged."""
        outgoing = request.outgoing
        if outgoing is None or not self._chunks:
            return
        for number in [number for number in self._chunks if number not in outgoing.unacked]:
            chunk = self._chunks.pop(number)
            self._say(chunk.ordered, f"{_chunk(number, chunk)}; acknowledged {now - chunk.ordered:.3f} s later")

    def _told_tokens(self) -> None:
        """The tokens behind the first one."""
        times, self._token_times = self._token_times, []
        if len(times) < 2:
            return
        gaps = [(later - earlier, later) for earlier, later in pairwise(times)]
        usual, (longest, at) = median(gap for gap, _ in gaps), max(gaps)
        text = f"it generates {counted(len(gaps), 'more token')} by {self._playback.since(times[-1]):.3f} s"
        text += f", {1000 * usual:.1f} ms from one to the next (median)"
        if longest > LONG_GAP * usual and len(gaps) > LONG_GAP:
            text += f", at most {1000 * longest:.1f} ms, before the one at {self._playback.since(at):.3f} s"
        if self._companions:
            fewest, most = min(self._companions), max(self._companions)
            rows = f"{fewest} rows" if fewest == most else f"{fewest} to {most} rows"
            text += f"; passes with it have {rows}"
        self._say(times[0], text)


_ENDS = {
    "stop": "a token or text that it stops at",
    "length": "as many tokens as it may have",
    "handoff": "all of its KV is at its decode server",
    "discarded": "its KV is not wanted",
    "fetched": "its KV is in the prefix cache",
}


def short_sentence(text: str) -> str:
    """A message of an error, on one line."""
    return " ".join(text.split())[:300]


def _note(state: State, request: Request) -> Noted:
    incoming, queues = request.incoming, state.of(request).queues
    return Noted(
        phase=request.phase,
        serial=request.serial,
        replica=request.replica,
        pages=0 if request.lease is None else len(request.lease.pages),
        reserved=request.outgoing is not None,
        awaits_row=request.arrival in queues.awaiting_row,
        preempting=request.arrival in queues.preempting,
        asked=incoming is not None and incoming.state is not IncomingState.PREPARING,
        loading=request.lease is not None and request.lease.load is not None,
    )


def _route(route: AnyRoute, limit: int) -> str:
    match route:
        case SendTo(ticket=ticket, hold=hold, cached=cached):
            what = "its cached KV" if cached else "its KV"
            return f"{what} is {'held for' if hold else 'for'} the decode server that reserves ticket {short(ticket)}"
        case FetchFrom(prefill=prefill, ticket=ticket, prefix=prefix):
            what = "a prefix" if prefix else "its KV"
            return f"{what} is to come from {short(prefill)} under ticket {short(ticket)}"
        case DecodeHere():
            return f"to be computed and decoded here, up to {limit:,} tokens"
    return "to be computed here"


def _terms(terms: RequestTerms) -> str:
    found = [f"priority {terms.priority}"] if terms.priority else []
    found += [f"tenant {short(terms.tenant)}"] if terms.tenant else []
    found += [f"its first token wanted within {terms.slo_ttft_s:g} s"] if terms.slo_ttft_s is not None else []
    found += [f"all of it within {terms.deadline_s:g} s"] if terms.deadline_s is not None else []
    return f"; {', '.join(found)}" if found else ""


def _bound(request: Request, replicas: Iterable[Replica]) -> str:
    seconds = all(replica.costs.trusted for replica in replicas)
    loads = [
        f"{replica.index} has {replica.load_with(NOTHING, seconds):,.3f} s" if seconds
        else f"{replica.index} has {replica.load_with(NOTHING, seconds):,.0f} tokens"
        for replica in replicas
    ]  # fmt: skip
    return f"it is bound to replica {request.replica}; with it, replica {', replica '.join(loads)} left to compute"


def _computes(number: int, shared: SharedPass, tokens: int) -> str:
    row = shared.row
    end = row.start + row.count
    last = ", the last of them" if end == tokens else ""
    return f"pass {number} computes its tokens {row.start:,} to {end:,}{last}{shared.others}"


def _chunk(number: int, chunk: SentChunk) -> str:
    what = f"KV of its tokens {chunk.start:,} to {chunk.start + chunk.tokens:,}" if chunk.tokens else "its first token"
    return f"{what} is ordered out to {chunk.peer} as chunk {number}"
