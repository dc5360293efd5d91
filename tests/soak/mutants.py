"""Planted bugs: each takes away one thing that a guarantee stands on, by replacing a method meanwhile.

The schedules of a soak have to find each of them. One that is not found means that a check is missing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from headrace.core.messages.frontend import RequestFinished
from headrace.scheduler.batching.page_copies import PageCopies
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.prefill.holding import HeldRequests
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.requests.record import Phase, Request
from headrace.scheduler.requests.request_table import RequestTable
from headrace.scheduler.requests.transfers import IncomingTransfer, OutgoingTransfer
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.state.replica import Replica
from headrace.transfer.control.session import PeerSession
from headrace.transfer.control.session_table import Outcome, SessionTable
from headrace.transfer.data.chunk_verifier import ChunkVerifier
from headrace.transfer.data.inbound import InboundTable
from headrace.transfer.data.outbound import Outbound
from headrace.transfer.data.receiver import MetadataRows
from headrace.transfer.protocol import matching
from tests.soak.cases import Case, case_of, run_case
from tests.transfer.schedules import ProtocolSchedule


class Mutant(NamedTuple):
    """One planted bug."""

    name: str
    guarantee: str
    owner: Any
    """The class or module whose attribute is replaced."""

    method: str
    change: Callable[[Any], Any]
    """Makes the wrong one of the right one."""

    also: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    """The same bug in other places, where one alone would change nothing."""

    protocol: bool = False
    """The bug is in transfer/: schedules of the protocol look for it, the simulation does not run that code."""


def _never(_original: Any) -> Any:
    return lambda *_args, **_named: None


def _freed_while_sent(original: Any) -> Any:
    def stop(self: Completion, request: Request, now: float) -> None:
        if request.outgoing is None:
            original(self, request, now)

    return stop


def _told_before_quiet(original: Any) -> Any:
    def cancelled(self: Completion, request: Request, reason: str, now: float) -> None:
        original(self, request, reason, now)
        if request.outgoing is not None and request.outgoing.final_reply is not None:
            self._state.out.add(request.outgoing.final_reply)
            request.awaiting_stages.clear()
            self.release_if_safe(request)

    return cancelled


def _any_ack(_original: Any) -> Any:
    def ack(self: OutgoingTransfer, chunk: int, stage: int, size: int, now: float) -> bool:
        return self.unacked.pop(chunk, None) is not None

    return ack


def _ack_of_another(_original: Any) -> Any:
    def acked(self: KvHandoff, event: Any, now: float) -> None:
        for request in list(self._state.requests):
            outgoing = request.outgoing
            if outgoing is not None and outgoing.ack(event.chunk, event.stage, event.bytes, now):
                if outgoing.acknowledged and not request.ended:
                    self._completion.complete(request, "handoff", now)
                return

    return acked


def _failure_into_success(original: Any) -> Any:
    def fetching(self: RemoteFetch, serial: int) -> Any:
        request = self._state.requests.by_serial(serial)
        if request is not None and request.phase is Phase.FAILED and request.incoming is not None:
            return request, request.incoming
        return original(self, serial)

    return fetching


def _two_ends(original: Any) -> Any:
    def complete(self: Completion, request: Request, reason: str, now: float, first: Any = None) -> None:
        original(self, request, reason, now, first)
        if reason == "stop":
            usage, timing = request.usage(), request.timing()
            self._state.out.add(RequestFinished(rid=request.rid, reason=reason, usage=usage, timing=timing))

    return complete


def _other_order(original: Any) -> Any:
    """The first stage of a pipeline gets two orders the other way round."""

    def order(self: Replica, order: Any) -> None:
        effects = self._out._effects
        original(self, order)
        if len(effects) > 1 and type(effects[-1]) is type(effects[-2]) and not hasattr(effects[-1], "rows"):
            effects[-1], effects[-2] = effects[-2], effects[-1]

    return order


def _to_first_replica(original: Any) -> Any:
    def order(self: Replica, order: Any) -> None:
        original(self, order)
        if not self._alone and type(order).__name__ == "ReleaseRequest":
            self._out._effects[-1] = msgspec.structs.replace(self._out._effects[-1], replica=0)

    return order


def _row_kept(original: Any) -> Any:
    def free(self: Completion, request: Request) -> None:
        request.row = None
        original(self, request)

    return free


def _cancel_lost(original: Any) -> Any:
    def abort(self: Scheduler, event: Any, now: float) -> None:
        request = self._state.requests.live(event.rid)
        if request is None or request.phase is not Phase.GENERATING:
            original(self, event, now)

    return abort


def _unverified(original: Any) -> Any:
    def loaded(self: PageCopies, event: Any, now: float) -> None:
        original(self, msgspec.structs.replace(event, failed=b""), now)

    return loaded


def _preempted_in_flight(_original: Any) -> Any:
    def preempt(self: TokenGeneration, request: Request, now: float) -> None:
        self._state.of(request).queues.preempt(request)
        self._requeue(request, now)

    return preempt


def _early_publish(original: Any) -> Any:
    """Pages that are only planned go into the prefix tree, whatever their values turn out to be."""

    def publish(self: KvCache, lease: Any, tokens: Any, computed: int) -> None:
        original(self, lease, tokens, len(lease.pages) * self._page_size)

    return publish


def _nan_kept(original: Any) -> Any:
    def release(self: KvCache, lease: Any) -> None:
        lease.nonfinite = False
        original(self, lease)

    return release


def _same_serial(_original: Any) -> Any:
    return lambda self, request: None


def _writer_forgotten(original: Any) -> Any:
    def lose(self: IncomingTransfer) -> None:
        original(self)
        self.stop_writer()

    return lose


def _unlocked(original: Any) -> Any:
    def lock(self: PrefixTree, path: Any) -> None:
        original(self, path[:-1])

    return lock


def _wrong_prompt(_original: Any) -> Any:
    return lambda request, event: ""


def _wrong_place(original: Any) -> Any:
    """The peer's pages are counted from 0, not from what it has in its cache."""

    def until(self: OutgoingTransfer, end: int) -> Any:
        first = self.sent // self.dst_page_size
        return self.dst_pages[min(first, len(self.dst_pages) - 1) :] if self.cached_tokens else original(self, end)

    return until


def _deadline_forgotten(original: Any) -> Any:
    def computed(self: HeldRequests, request: Request, now: float) -> None:
        original(self, request, now)
        self._state.deadlines.reset()

    return computed


def _old_generations(original: Any) -> Any:
    def check(self: InboundTable, session: str, stage: int, header: Any, frames: list[int]) -> Any:
        for key in self._by_key:
            if key[:2] == (session, header.ticket):
                order = self._by_key[key].order
                header = msgspec.structs.replace(header, generation=key[2], row=order.row)
        return original(self, session, stage, header, frames)

    return check


def _revived(original: Any) -> Any:
    def reserve(self: SessionTable, peer: PeerSession, message: Any) -> Outcome:
        peer.ended.clear()
        return original(self, peer, message)  # type: ignore[no-any-return]

    return reserve


def _quota_kept(original: Any) -> Any:
    def end(self: PeerSession, ticket: str, generation: int) -> None:
        pages = self.pages
        original(self, ticket, generation)
        self.pages = pages

    return end


def _unchecked(_original: Any) -> Any:
    return lambda self, backend, accept, header, frames: accept


def _quiet_too_early(original: Any) -> Any:
    def settle(self: Outbound) -> Any:
        for owner in self._cancelling:
            owner.sent.clear()
        return original(self)

    return settle


def _acked_too_early(original: Any) -> Any:
    def settle(self: Outbound) -> Any:
        for part in self._settling:
            part.handles.clear()
        return original(self)

    return settle


def _no_window(original: Any) -> Any:
    def part(self: Outbound, lane: Any) -> Any:
        window, lane.window_bytes = lane.window_bytes, 1 << 40
        try:
            return original(self, lane)
        finally:
            lane.window_bytes = window

    return part


def _cancel_ignored(_original: Any) -> Any:
    return lambda self, peer, cancel: Outcome([], [])


def _any_model(original: Any) -> Any:
    def check(ours: Any, *rest: Any) -> Any:
        refusal = original(ours, *rest)
        return None if refusal is not None and refusal.code == "fingerprint_mismatch" else refusal

    return check


def _row_not_cleared(_original: Any) -> Any:
    return lambda self, row: None


MUTANTS = (
    Mutant("pages are freed while they are sent", "G3", Completion, "_stop_transfers", _freed_while_sent),
    Mutant("a cancel is answered before the stages are quiet", "G2", Completion, "cancelled_by_peer",
           _told_before_quiet),
    Mutant("an acknowledgement of one stage counts for all", "G3", OutgoingTransfer, "ack", _any_ack),
    Mutant("an acknowledgement of another request is accepted", "G5", KvHandoff, "acked", _ack_of_another),
    Mutant("a failed request goes on when its KV arrives", "G1", RemoteFetch, "_fetching", _failure_into_success),
    Mutant("a request ends twice", "G1", Completion, "complete", _two_ends),
    Mutant("orders change places", "G8", Replica, "order", _other_order),
    Mutant("a release goes to another replica", "G8", Replica, "order", _to_first_replica),
    Mutant("a metadata row is not given back", "G7", Completion, "free_pages", _row_kept),
    Mutant("a cancel is lost while tokens are generated", "G1", Scheduler, "_abort", _cancel_lost),
    Mutant("a heartbeat does not renew the lease", "G1", HeldRequests, "renewed", _never),
    Mutant("pages from a tier are used unverified", "G4", PageCopies, "loaded", _unverified),
    Mutant("a request is preempted while plans hold its pages", "G3", TokenGeneration, "_preempt",
           _preempted_in_flight),
    Mutant("pages are published before they are computed", "G4", KvCache, "publish", _early_publish),
    Mutant("pages with NaN stay in the prefix cache", "G4", KvCache, "release", _nan_kept),
    Mutant("a preempted request keeps its serial", "G5", RequestTable, "renumber", _same_serial),
    Mutant("pages are reused before a lost writer is shut out", "G2", IncomingTransfer, "lose", _writer_forgotten),
    Mutant("a cached page is not pinned", "G3", PrefixTree, "lock", _unlocked),
    Mutant("chunks go to the wrong pages of a peer with a cache", "G8", OutgoingTransfer, "dst_pages_until",
           _wrong_place),
    Mutant("a deadline is forgotten", "G1", HeldRequests, "computed", _deadline_forgotten),
    Mutant("a reservation that times out is not told", "G1", Rendezvous, "reservation_timed_out", _never),
    Mutant("chunks of an older generation are written", "G5", InboundTable, "check", _old_generations, protocol=True),
    Mutant("a late reservation revives a ticket", "G5", SessionTable, "_reserve", _revived, protocol=True),
    Mutant("pages of ended tickets count against the quota", "G7", PeerSession, "end", _quota_kept, protocol=True),
    Mutant("checksums are not compared", "G4", ChunkVerifier, "verify", _unchecked, protocol=True),
    Mutant("a cancelled send is reported while it goes on", "G2", Outbound, "settle", _quiet_too_early, protocol=True),
    Mutant("a chunk is reported while its pages are read", "G3", Outbound, "settle", _acked_too_early, protocol=True),
    Mutant("the window of a peer is not kept", "G7", Outbound, "next_part", _no_window, protocol=True),
    Mutant("a cancel of a peer is ignored", "G1", SessionTable, "_cancel", _cancel_ignored, protocol=True),
    Mutant("another model is welcome", "G6", matching, "check_hello", _any_model,
           also=((matching, "check_welcome", _any_model),), protocol=True),
    Mutant("a metadata row is used again without being cleared", "G5", MetadataRows, "clear", _row_not_cleared,
           protocol=True),
)  # fmt: skip


class Found(NamedTuple):
    """How a mutant was found."""

    schedules: int
    """Schedules that were run, the one that found it included."""

    case: Case
    problem: str


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is there meanwhile."""
    with ExitStack() as stack:
        for owner, name, change in ((mutant.owner, mutant.method, mutant.change), *mutant.also):
            stack.enter_context(patch.object(owner, name, change(getattr(owner, name))))
        yield


def hunt(mutant: Mutant, limit: int, first_seed: int = 0) -> Found | None:
    """Run the schedules of a soak until one finds the mutant; None if none of them does. For a bug in transfer/ every
    schedule is one of the protocol: the others do not run its code."""
    with planted(mutant):
        for seed in range(first_seed, first_seed + limit):
            case = case_of(seed)
            if mutant.protocol and not isinstance(case, ProtocolSchedule):
                case = ProtocolSchedule(seed, steps=1 + seed % 6)
            elif isinstance(case, ProtocolSchedule) and not mutant.protocol:
                continue
            if problems := run_case(case).problems:
                return Found(seed - first_seed + 1, case, problems[0])
    return None
