"""Why a request is in no forward pass: what the state of the scheduler says of it, in words."""

from typing import NamedTuple

from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State
from headrace.tools.replay.words import brief, short


class WaitReason(NamedTuple):
    """What a request waits for."""

    kind: str
    """Equal for reasons that differ in numbers only."""

    text: str


def reason(state: State, request: Request, tokens: int = 0, rows: int = 0) -> WaitReason:
    """What a request waits for, as far as the state shows. tokens, rows: of a pass that was ordered just now without
    it; 0 where none was."""
    replica = state.of(request)
    peer = short(state.peer_of(request)) or "its peer"
    match request.phase:
        case Phase.BOOTSTRAP if request.outgoing is None:
            return WaitReason("peer", f"no decode server has reserved ticket {brief(request.ticket)}")
        case Phase.BOOTSTRAP:
            text = f"it is held back: the owner of {peer} has more KV unacknowledged than is left of the pool"
            return WaitReason("held back", text)
        case Phase.INFLIGHT if request.outgoing is None:
            return WaitReason("held", "its KV is held until a decode server reserves it")
        case Phase.INFLIGHT if request.row is None:
            return _no_row(state)
        case Phase.INFLIGHT:
            return WaitReason("acknowledgement", f"{peer} has not acknowledged all of its KV")
        case Phase.FETCHING:
            return WaitReason("fetch", f"its KV has not come from {peer}")
    if not state.engine.ready:
        return WaitReason("stages", "the stages are not up")
    if request.arrival in replica.queues.preempting:
        return WaitReason("preempted", "it gives up its pages when the passes that it is in are done")
    if request.lease is None:
        lacking = _lacking(state, replica, request)
        return lacking or _behind(state, replica, request, tokens, rows)
    if not request.has_kv:
        return WaitReason("load", "its cached pages are being loaded from a tier")
    if request.planned >= request.target and request.phase is Phase.RUNNING:
        return WaitReason("planned", "all of its prompt is in passes that are not done")
    return _behind(state, replica, request, tokens, rows)


def _no_row(state: State) -> WaitReason:
    return WaitReason("row", f"all {state.metadata_rows.total} metadata rows are in use")


def _lacking(state: State, replica: Replica, request: Request) -> WaitReason | None:
    """Pages, or a metadata row, that are not to be had."""
    cache = replica.cache
    needed, cached = cache.pages_for(request.target), request.queued.expected_cached // cache.page_size
    if (lacking := replica.pages_lacking(request)) > 0:
        have = f", {cached:,} of them cached," if cached else ""
        text = (
            f"it needs {needed:,} pages{have} and lacks {lacking:,}: {cache.free:,} are free, {cache.cached:,} cached "
            f"and {cache.leased:,} of {cache.total:,} leased"
        )
        return WaitReason("pages", text)
    if (request.outgoing is not None or request.to_fetch) and not state.metadata_rows.free:
        return _no_row(state)
    if request.decodes_here and len(replica.queues.decoding) >= state.config.max_running:
        return WaitReason("decoding", f"{len(replica.queues.decoding)} requests decode, as many as may")
    older = _claimant(replica, request)
    if older is None:
        return None
    return WaitReason("claim", f"pages are kept for {brief(older.rid)}, which came before it and lacks some")


def _claimant(replica: Replica, request: Request) -> Request | None:
    """The oldest request that waits for pages of the same replica and lacks some, if it is older."""
    queue = replica.queues.to_fetch if request.to_fetch else replica.queues.policy
    waiting = [other for other in queue if other.phase is Phase.WAITING and other.arrival < request.arrival]
    oldest = min(waiting, key=lambda other: other.arrival, default=None)
    return oldest if oldest is not None and replica.pages_lacking(oldest) > 0 else None


def _behind(state: State, replica: Replica, request: Request, tokens: int, rows: int) -> WaitReason:
    """It could be planned, and others were, or nothing was."""
    config = state.config
    if isinstance(request.route, FetchFrom) and request.to_fetch:
        return WaitReason("order", "requests before it are fetched first")
    if not rows and len(replica.plans) >= config.credits:
        return WaitReason("credits", f"{len(replica.plans)} passes are in flight, as many as may")
    if not rows:
        return WaitReason("next", "the next pass is not planned yet")
    if rows >= config.max_running:
        return WaitReason("rows", f"the passes are full: {config.max_running} rows")
    if tokens >= config.chunk_tokens:
        return WaitReason("tokens", f"the passes are full: {config.chunk_tokens:,} tokens")
    if request.gives_way:
        return WaitReason("gives way", "its decode server has not reserved: those whose decode server has go first")
    return WaitReason("filling", f"{rows} others come first, and filling the passes up with it would make them longer")
