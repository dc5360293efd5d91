"""Planted bugs: each takes away one thing that a guarantee stands on, by replacing a method meanwhile.

The schedules of a soak have to find each of them. One that is not found means that a check is missing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from headrace.core.incoming import IncomingTransfer
from headrace.scheduler.batching.page_copies import PageCopies
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.lifecycle.preemption import Preemption
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.prefill.holding import HeldRequests
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.requests.request_table import RequestTable
from headrace.scheduler.requests.transfers import OutgoingTransfer
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.state.replica import Replica
from headrace.transfer.control.session import PeerSession
from headrace.transfer.control.session_table import SessionTable
from headrace.transfer.data.chunk_verifier import ChunkVerifier
from headrace.transfer.data.inbound import InboundTable
from headrace.transfer.data.outbound import Outbound
from headrace.transfer.data.receiver import MetadataRows
from headrace.transfer.protocol import matching
from tests.soak import wrong
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


MUTANTS = (
    Mutant("pages are freed while they are sent", "G3", Completion, "_stop_transfers", wrong.freed_while_sent),
    Mutant("a cancel is answered before the stages are quiet", "G2", Completion, "cancelled_by_peer",
           wrong.told_before_quiet),
    Mutant("an acknowledgement of one stage counts for all", "G3", OutgoingTransfer, "ack", wrong.any_ack),
    Mutant("an acknowledgement of another request is accepted", "G5", KvHandoff, "acked", wrong.ack_of_another),
    Mutant("a failed request goes on when its KV arrives", "G1", RemoteFetch, "_fetching", wrong.failure_into_success),
    Mutant("a request ends twice", "G1", Completion, "complete", wrong.two_ends),
    Mutant("orders change places", "G8", Replica, "order", wrong.other_order),
    Mutant("a release goes to another replica", "G8", Replica, "order", wrong.to_first_replica),
    Mutant("a metadata row is not given back", "G7", Completion, "free_pages", wrong.row_kept),
    Mutant("a cancel is lost while tokens are generated", "G1", Scheduler, "_abort", wrong.cancel_lost),
    Mutant("a heartbeat does not renew the lease", "G1", HeldRequests, "renewed", wrong.never),
    Mutant("a heartbeat renews leases alone", "G1", HeldRequests, "renewed", wrong.leases_alone),
    Mutant("pages from a tier are used unverified", "G4", PageCopies, "_loaded", wrong.unverified),
    Mutant("a request is preempted while plans hold its pages", "G3", Preemption, "preempt",
           wrong.preempted_in_flight),
    Mutant("pages are published before they are computed", "G4", KvCache, "publish", wrong.early_publish),
    Mutant("pages with NaN stay in the prefix cache", "G4", TokenGeneration, "plan_done",
           wrong.nan_of_chunks_passed_over),
    Mutant("a preempted request keeps its serial", "G5", RequestTable, "renumber", wrong.same_serial),
    Mutant("pages are reused before a lost writer is shut out", "G2", IncomingTransfer, "lose", wrong.writer_forgotten),
    Mutant("a cached page is not pinned", "G3", PrefixTree, "lock", wrong.unlocked),
    Mutant("chunks go to the wrong pages of a peer with a cache", "G8", OutgoingTransfer, "dst_pages_until",
           wrong.wrong_place),
    Mutant("a deadline is forgotten", "G1", HeldRequests, "computed", wrong.deadline_forgotten),
    Mutant("a reservation that times out is not told", "G1", Rendezvous, "reservation_timed_out", wrong.never),
    Mutant("an older generation is written", "G5", InboundTable, "check", wrong.old_generations, protocol=True),
    Mutant("a late reservation revives a ticket", "G5", SessionTable, "_reserve", wrong.revived, protocol=True),
    Mutant("pages of ended tickets count against the quota", "G7", PeerSession, "end", wrong.quota_kept, protocol=True),
    Mutant("checksums are not compared", "G4", ChunkVerifier, "verify", wrong.unchecked, protocol=True),
    Mutant("a cancel is reported while bytes go on", "G2", Outbound, "settle", wrong.quiet_too_early, protocol=True),
    Mutant("a chunk is reported while it is read", "G3", Outbound, "settle", wrong.acked_too_early, protocol=True),
    Mutant("the window of a peer is not kept", "G7", Outbound, "next_part", wrong.no_window, protocol=True),
    Mutant("a cancel of a peer is ignored", "G1", SessionTable, "_cancel", wrong.cancel_ignored, protocol=True),
    Mutant("another model is welcome", "G6", matching, "check_hello", wrong.any_model,
           also=((matching, "check_welcome", wrong.any_model),), protocol=True),
    Mutant("a metadata row is used again without being cleared", "G5", MetadataRows, "clear", wrong.row_not_cleared,
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
