"""What servers with a scheduler each agree on before every forward pass, since they share experts: one all-reduce of
their votes, which goes through core/types/ranks/coordinate.py as in a server with several replicas.

    server 0   plan ─► vote ─┐                 ┌─► pass with its rows
    server 1   plan ─► vote ─┼─ all-reduce ────┼─► pass with its rows
    server 2   none ─► vote ─┘  coordinate()   └─► pass without rows: its experts work for the others

A rank without a plan votes, too: at once after a pass, and TICK_S, later LONG_TICK_S, after a vote in which no rank had
a token, which makes no pass. No rank is told to start or to stop; a plan that comes meanwhile is voted on at once.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from headrace.core.messages.orders import AnyOrder, Forward
from headrace.core.types.ranks.coordinate import Agreement, Rules, Vote, coordinate, vote
from headrace.engine.collectives.operations import Collectives, Pending

TICK_S = 0.005  # between votes of an idle group
LONG_TICK_S = 0.02  # the same after BUSY_TICKS votes: a group that has nothing to do for long leaves the cores alone
BUSY_TICKS = 200
TOLD_TICKS = 100  # idle votes until the other shards hear of one: a wait of theirs is bounded by a timeout
_FIXED = 4  # numbers of a message to the shards before the tokens of each replica

Idle = Callable[[float | None], None]
"""Waits for an order to arrive, for at most so many seconds; None: without end."""


class AgreementBroken(Exception):
    """The votes contradict each other, or a plan that all agreed on is not there."""


class PostedVote(NamedTuple):
    """A vote whose all-reduce is under way."""

    vote: Vote
    rank: int
    rules: Rules
    pending: Pending

    def wait(self) -> Agreement:
        """The agreement, once all have voted. Raises LinkBroken when a rank is gone, AgreementBroken when this rank's
        own vote comes back altered."""
        tokens, padded, wishes, modes = self.pending.wait().tolist()
        votes = [Vote(*each) for each in zip(tokens, padded, map(bool, wishes), modes, strict=True)]
        if votes[self.rank] != self.vote:
            raise AgreementBroken(f"rank {self.rank} has voted {self.vote} and got {votes[self.rank]} back")
        agreement = coordinate(votes, self.rules)
        if agreement is None:
            raise AgreementBroken("a single rank has nothing to agree on")
        return agreement


def post(vote: Vote, group: Collectives, rules: Rules, device: str = "cpu") -> PostedVote:
    """Begin the all-reduce of a vote: int32 [4, ranks], zeros but for this rank's column.

    group: the voting ranks, by replica. device: where the group computes. Raises LinkBroken when a rank is gone.
    """
    before, after = [0] * group.rank, [0] * (group.size - group.rank - 1)
    columns = torch.tensor([[*before, number, *after] for number in vote], dtype=torch.int32, device=device)
    return PostedVote(vote, group.rank, rules, group.all_reduce(columns))


def agree(vote: Vote, group: Collectives, rules: Rules, device: str = "cpu") -> Agreement:
    """The agreement on the votes of all ranks of a group. Raises what post() and PostedVote.wait() raise."""
    return post(vote, group, rules, device).wait()


class PassSource(Protocol):
    """Orders of a rank, with the passes that other servers have planned among them."""

    def next(self, queued: deque[AnyOrder], idle: Idle) -> AnyOrder:
        """The next order. A Forward has an agreement, and seq 0 where it is not an order of this server's scheduler.

        queued: orders that have arrived, in order; it takes its own from there. idle: see Idle. Raises LinkBroken when
        a rank is gone, AgreementBroken.
        """
        ...


class VotedPasses:
    """The PassSource of a rank that votes: the first shard of its server. Used by the compute thread alone."""

    def __init__(
        self,
        group: Collectives,
        rules: Rules,
        *,
        shards: Collectives | None = None,
        device: str = "cpu",
        tick_s: float = TICK_S,
        long_tick_s: float = LONG_TICK_S,
    ) -> None:
        """group: the voting ranks of all servers. rules: the same at all of them. shards: of this server, which are
        told; None where this rank is the only one. device: of the group.
        tick_s, long_tick_s: between votes of an idle group, in its first BUSY_TICKS votes and after them."""
        self._group = group
        self._rules = rules
        self._shards = shards
        self._device = device
        self._tick_s = tick_s
        self._long_tick_s = long_tick_s
        self._posted: tuple[Forward | None, PostedVote] | None = None
        self._untold = 0  # idle votes since the shards were told of one
        self._idle = 0  # idle votes since the last pass

    def next(self, queued: deque[AnyOrder], idle: Idle) -> AnyOrder:
        """See PassSource."""
        while True:
            if queued and not isinstance(queued[0], Forward):
                return queued.popleft()
            plan, posted = self._posted or self._post(_next_plan(queued))
            self._posted = None
            agreement = posted.wait()
            if not agreement.idle:
                return self._begin(plan, agreement, queued)
            self._untold += 1
            self._idle += 1
            if self._untold >= TOLD_TICKS:
                self._tell(0, agreement)
            idle(self._tick_s if self._idle <= BUSY_TICKS else self._long_tick_s)

    def _begin(self, plan: Forward | None, agreement: Agreement, queued: deque[AnyOrder]) -> Forward:
        """The pass that was agreed on. The vote on the next plan, if it is there, travels meanwhile."""
        self._idle = 0
        if plan is not None:
            queued.popleft()
        self._tell(plan.seq if plan is not None else 0, agreement)
        if (ahead := _next_plan(queued)) is not None:
            self._posted = self._post(ahead)
        return _agreed(plan, agreement)

    def _post(self, plan: Forward | None) -> tuple[Forward | None, PostedVote]:
        own = vote([row.count for row in plan.rows] if plan is not None else [], self._rules)
        return plan, post(own, self._group, self._rules, self._device)

    def _tell(self, seq: int, agreement: Agreement) -> None:
        self._untold = 0
        if self._shards is not None:
            self._shards.broadcast(_encoded(seq, agreement), 0).wait()


class FollowedPasses:
    """The PassSource of the other shards of a server: they take what the first one was told, since an order may reach
    them on another side of a vote. Used by the compute thread alone."""

    def __init__(self, shards: Collectives, replicas: int) -> None:
        """shards: of this server. replicas: servers of the group."""
        self._shards = shards
        self._replicas = replicas
        self._told: tuple[int, Agreement] | None = None  # of the pass whose turn it is

    def next(self, queued: deque[AnyOrder], idle: Idle) -> AnyOrder:
        """See PassSource."""
        while True:
            if queued and not isinstance(queued[0], Forward):
                return queued.popleft()
            seq, agreement = self._told or self._hear()
            self._told = None
            if agreement.idle:
                idle(0.0)
            elif not seq:
                return _agreed(None, agreement)
            elif not queued:
                self._told = seq, agreement
                idle(None)
            else:
                return _agreed(self._planned(queued, seq), agreement)

    def _hear(self) -> tuple[int, Agreement]:
        blank = torch.zeros(_FIXED + self._replicas, dtype=torch.int64)
        return _decoded(self._shards.broadcast(blank, 0).wait())

    @staticmethod
    def _planned(queued: deque[AnyOrder], seq: int) -> Forward:
        plan = queued.popleft()
        if not isinstance(plan, Forward) or plan.seq != seq:
            raise AgreementBroken(f"the next pass is order {seq}, and this shard's next order is {plan.seq}")
        return plan


def _next_plan(queued: deque[AnyOrder]) -> Forward | None:
    return next((order for order in queued if isinstance(order, Forward)), None)


def _agreed(plan: Forward | None, agreement: Agreement) -> Forward:
    """A plan with its agreement; without a plan a pass of other servers."""
    if plan is None:
        return Forward(seq=0, rows=(), agreement=agreement)
    return msgspec.structs.replace(plan, agreement=agreement)


def _encoded(seq: int, agreement: Agreement) -> Tensor:
    """A message to the shards: int64 [_FIXED + replicas]."""
    numbers = (seq, agreement.padded, agreement.cut, agreement.mode, *agreement.tokens)
    return torch.tensor(numbers, dtype=torch.int64)


def _decoded(message: Tensor) -> tuple[int, Agreement]:
    seq, padded, cut, mode, *tokens = message.tolist()
    return seq, Agreement(tuple(tokens), padded, cut, mode)
