"""What planted bugs put in the place of methods: each takes the right one, and returns a wrong one."""

from typing import Any

import msgspec

from headrace.core.incoming import IncomingTransfer
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import PlanDone
from headrace.scheduler.batching.page_copies import PageCopies
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.lifecycle.preemption import Preemption
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.prefill.holding import HeldRequests
from headrace.scheduler.queues.deadlines import Deadlines
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.requests.transfers import OutgoingTransfer
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.state.plan_table import Plan
from headrace.scheduler.state.replica import Replica
from headrace.transfer.control.session import PeerSession
from headrace.transfer.control.session_table import SessionOutcome, SessionTable
from headrace.transfer.data.inbound import InboundTable
from headrace.transfer.data.outbound import Outbound


def never(_original: Any) -> Any:
    return lambda *_args, **_named: None


def freed_while_sent(original: Any) -> Any:
    def stop(self: Completion, request: Request, now: float) -> None:
        if request.outgoing is None:
            original(self, request, now)

    return stop


def told_before_quiet(original: Any) -> Any:
    def cancelled(self: Completion, request: Request, reason: str, now: float) -> None:
        original(self, request, reason, now)
        if request.outgoing is not None and request.outgoing.final_reply is not None:
            self._state.out.add(request.outgoing.final_reply)
            request.on_stages.stopping.clear()
            self.release_if_safe(request)

    return cancelled


def any_ack(_original: Any) -> Any:
    def ack(self: OutgoingTransfer, chunk: int, stage: int, size: int, now: float) -> bool:
        return self.unacked.pop(chunk, None) is not None

    return ack


def ack_of_another(_original: Any) -> Any:
    def acked(self: KvHandoff, event: Any, now: float) -> None:
        for request in list(self._state.requests):
            outgoing = request.outgoing
            if outgoing is not None and outgoing.ack(event.chunk, event.stage, event.bytes, now):
                if outgoing.acknowledged and not request.ended:
                    self._completion.complete(request, "handoff", now)
                return

    return acked


def failure_into_success(original: Any) -> Any:
    def fetching(self: RemoteFetch, serial: int) -> Any:
        request = self._state.requests.by_serial(serial)
        if request is not None and request.phase is Phase.FAILED and request.incoming is not None:
            return request, request.incoming
        return original(self, serial)

    return fetching


def two_ends(original: Any) -> Any:
    def complete(self: Completion, request: Request, reason: str, now: float, first: Any = None) -> None:
        original(self, request, reason, now, first)
        if reason == "stop":
            usage, timing = request.usage(), request.timing()
            self._state.out.add(RequestFinished(rid=request.rid, reason=reason, usage=usage, timing=timing))

    return complete


def other_order(original: Any) -> Any:
    """The first stage of a pipeline gets two orders the other way round."""

    def order(self: Replica, order: Any) -> None:
        effects = self._out._effects
        original(self, order)
        if len(effects) > 1 and type(effects[-1]) is type(effects[-2]) and not hasattr(effects[-1], "rows"):
            effects[-1], effects[-2] = effects[-2], effects[-1]

    return order


def to_first_replica(original: Any) -> Any:
    def order(self: Replica, order: Any) -> None:
        original(self, order)
        if not self._alone and type(order).__name__ == "ReleaseRequest":
            self._out._effects[-1] = msgspec.structs.replace(self._out._effects[-1], replica=0)

    return order


def row_kept(original: Any) -> Any:
    def free(self: Completion, request: Request) -> None:
        request.row = None
        original(self, request)

    return free


def cancel_lost(original: Any) -> Any:
    def abort(self: Scheduler, event: Any, now: float) -> None:
        request = self._state.requests.live(event.rid)
        if request is None or request.phase is not Phase.GENERATING:
            original(self, event, now)

    return abort


def leases_alone(original: Any) -> Any:
    def renewed(self: HeldRequests, event: Any, now: float) -> None:
        held = tuple(
            ticket
            for ticket in event.tickets
            if (request := self._state.tickets.holder(ticket)) is not None and request.held
        )
        original(self, msgspec.structs.replace(event, tickets=held), now)

    return renewed


def unverified(original: Any) -> Any:
    def loaded(self: PageCopies, event: Any, now: float) -> None:
        original(self, msgspec.structs.replace(event, failed=b""), now)

    return loaded


def preempted_in_flight(_original: Any) -> Any:
    def preempt(self: Preemption, request: Request, now: float) -> None:
        self._state.of(request).queues.preempt(request)
        self._requeue(request, now)

    return preempt


def early_publish(original: Any) -> Any:
    """Pages that are only planned go into the prefix tree, whatever their values turn out to be."""

    def publish(self: KvCache, lease: Any, tokens: Any, computed: int) -> None:
        original(self, lease, tokens, len(lease.pages) * self.page_size)

    return publish


def nan_of_chunks_passed_over(original: Any) -> Any:
    """Only rows that are sampled are looked at."""

    def plan_done(self: TokenGeneration, plan: Plan, event: PlanDone, now: float) -> None:
        sampled = {row.serial for row in plan.rows if row.sampled}
        found = [serial for serial in event.nonfinite if serial in sampled]
        original(self, plan, msgspec.structs.replace(event, nonfinite=found), now)

    return plan_done


def same_serial(_original: Any) -> Any:
    return lambda self, request: None


def writer_forgotten(original: Any) -> Any:
    def lose(self: IncomingTransfer) -> None:
        original(self)
        self.stop_writer()

    return lose


def unlocked(original: Any) -> Any:
    def lock(self: PrefixTree, path: Any) -> None:
        original(self, path[:-1])

    return lock


def wrong_prompt(_original: Any) -> Any:
    return lambda request, event: ""


def wrong_place(original: Any) -> Any:
    """The peer's pages are counted from 0, not from what it has in its cache."""

    def until(self: OutgoingTransfer, end: int) -> Any:
        first = self.sent // self.dst_page_size
        return self.dst_pages[min(first, len(self.dst_pages) - 1) :] if self.cached_tokens else original(self, end)

    return until


def deadline_forgotten(original: Any) -> Any:
    def computed(self: HeldRequests, request: Request, now: float) -> None:
        original(self, request, now)
        self._state.deadlines = Deadlines()

    return computed


def old_generations(original: Any) -> Any:
    def check(self: InboundTable, session: str, stage: int, header: Any, frames: list[int]) -> Any:
        for key in self._by_key:
            if key[:2] == (session, header.ticket):
                order = self._by_key[key].order
                header = msgspec.structs.replace(header, generation=key[2], row=order.row)
        return original(self, session, stage, header, frames)

    return check


def revived(original: Any) -> Any:
    def reserve(self: SessionTable, peer: PeerSession, message: Any) -> SessionOutcome:
        peer.ended.clear()
        return original(self, peer, message)  # type: ignore[no-any-return]

    return reserve


def quota_kept(original: Any) -> Any:
    def end(self: PeerSession, ticket: str, generation: int) -> None:
        pages = self.pages
        original(self, ticket, generation)
        self.pages = pages

    return end


def unchecked(_original: Any) -> Any:
    return lambda self, backend, accept, header, frames: accept


def quiet_too_early(original: Any) -> Any:
    def settle(self: Outbound) -> Any:
        for owner in self._cancelling:
            owner.sent.clear()
        return original(self)

    return settle


def acked_too_early(original: Any) -> Any:
    def settle(self: Outbound) -> Any:
        for part in self._settling:
            part.handles.clear()
        return original(self)

    return settle


def no_window(original: Any) -> Any:
    def part(self: Outbound, lane: Any) -> Any:
        window, lane.window_bytes = lane.window_bytes, 1 << 40
        try:
            return original(self, lane)
        finally:
            lane.window_bytes = window

    return part


def cancel_ignored(_original: Any) -> Any:
    return lambda self, peer, cancel: SessionOutcome([], [])


def any_model(original: Any) -> Any:
    def check(ours: Any, *rest: Any) -> Any:
        refusal = original(ours, *rest)
        return None if refusal is not None and refusal.code == "fingerprint_mismatch" else refusal

    return check


def row_not_cleared(_original: Any) -> Any:
    return lambda self, row: None
