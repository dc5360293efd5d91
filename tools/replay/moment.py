"""The state of the scheduler at one time of a recording, in words: queues, pages, passes in flight, requests."""

from collections.abc import Iterator, Sequence

from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State
from headrace.tools.replay import waits
from headrace.tools.replay.playback import Playback
from headrace.tools.replay.words import brief, called, counted, short

MOST = 12  # requests of a list


def as_text(playback: Playback) -> str:
    """The state after the calls that were applied."""
    return "\n".join(_lines(playback))


def _lines(playback: Playback) -> Iterator[str]:
    state, now = playback.scheduler.state, playback.now
    yield f"{playback.since(now):.3f} s ({playback.wall(now)}), after {playback.position:,} of {len(playback):,} calls"
    if playback.position < len(playback):
        call = playback.call(playback.position)
        yield f"next      {called(call, playback.name_of)} at {playback.since(call.now):.3f} s"
    if not state.engine.ready:
        yield "stages    not up"
    phases = [
        f"{phase.value} {count:,} ({state.phase_tokens[phase]:,} tokens)" for phase, count in state.phases.items()
    ]
    yield f"queues    {', '.join(phases)}"
    predicted = f", {state.unplanned_s:.3f} s as predicted" if state.costs_trusted else ""
    yield f"to plan   {state.unplanned:,} tokens{predicted}"
    for replica in state.replicas:
        yield from _replica(playback, replica, now)
    rows = state.metadata_rows
    yield f"rows      {rows.total - rows.free} of {rows.total} metadata rows in use"
    for title, requests in _listed(state, now):
        yield f"{title:<9} {len(requests):,}"
        yield from (f"  {_request(state, request, now)}" for request in requests[:MOST])
        if len(requests) > MOST:
            yield f"  and {len(requests) - MOST:,} more"


def _replica(playback: Playback, replica: Replica, now: float) -> Iterator[str]:
    state, cache = playback.scheduler.state, replica.cache
    at = f" of replica {replica.index}" if len(state.replicas) > 1 else ""
    yield f"pages     {cache.free:,} free, {cache.cached:,} cached, {cache.leased:,} leased of {cache.total:,}{at}"
    yield f"passes    {len(replica.plans)} of {state.config.credits} in flight{at}"
    for plan in replica.plans:
        shown = [f"{brief(row.request.rid)} to {row.end:,}" for row in plan.rows[:MOST]]
        more = f" and {len(plan.rows) - MOST} more" if len(plan.rows) > MOST else ""
        decoding = f", {plan.decode_rows} that decode" if plan.decode_rows else ""
        yield (
            f"  {plan.seq}: {counted(plan.tokens, 'token')} in {counted(len(plan.rows), 'row')}{decoding}, "
            f"for {now - plan.begun:.3f} s: {', '.join(shown) or 'idle'}{more}"
        )


def _listed(state: State, now: float) -> Iterator[tuple[str, Sequence[Request]]]:
    """Requests by what becomes of them, those that wait in the order in which they will be looked at."""
    live = [request for request in state.requests.in_order if not request.ended]
    for title, phase in (("peers", Phase.BOOTSTRAP), ("fetching", Phase.FETCHING)):
        if found := [request for request in live if request.phase is phase]:
            yield title, found
    waiting = [
        request
        for replica in state.replicas
        for request in replica.queues.policy.ranked(now)
        if request.phase is Phase.WAITING
    ]
    known = {request.arrival for request in waiting}
    waiting += [request for request in live if request.phase is Phase.WAITING and request.arrival not in known]
    yield "waiting", waiting
    yield "running", [request for request in live if request.phase in (Phase.RUNNING, Phase.GENERATING)]
    yield "sending", [request for request in live if request.phase is Phase.INFLIGHT]
    if ending := [request for request in state.requests if request.ended]:
        yield "ending", ending


def _request(state: State, request: Request, now: float) -> str:
    done, tokens = min(request.computed, request.prompt_tokens), request.prompt_tokens
    text = f"{brief(request.rid)}: {done:,} of {tokens:,} tokens computed{', open prompt' * request.open}"
    if request.generated:
        text += f", {request.generated:,} generated"
    text += f", {request.phase.value} for {now - request.since:.3f} s"
    if request.ended:
        return f"{text}; stages {sorted(request.on_stages.stopping)} stop" if request.on_stages.stopping else text
    if isinstance(request.route, FetchFrom) or request.outgoing is not None:
        text += f", {'from' if isinstance(request.route, FetchFrom) else 'to'} {short(state.peer_of(request))}"
    if request.phase is Phase.GENERATING or (request.phase is Phase.RUNNING and request.in_flight):
        return text
    return f"{text}: {waits.reason(state, request).text}"
