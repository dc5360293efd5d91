"""Pipeline-parallel communication: hidden states forward, sampled tokens back, over carriers.py.

    stage 0 ──hidden──► stage 1 ──hidden──► stage 2        point to point, in plan order, shard t to shard t
       ▲                   ▲                   │
       └───────────────────┴──── tokens ───────┘           broadcast, over a communicator of its own

Shapes follow from the plan, so no metadata is sent. Hidden states are whole on every shard of a stage. Receives are
posted ahead of their turn, and a send is waited for when its plan is known to be done, so neither neighbour holds the
other up. The broadcast has a communicator of its own so that it does not queue behind hidden states; its source is the
first shard of the last stage. All shards of the first stage embed tokens, and wait for it only when a later plan takes
a token from it (about `stages` plans later). A plan whose rows feed no later row causes no broadcast.

Nothing asks an operation whether it is completed: Gloo's sends do not say so before they are waited for. The scheduler
orders a plan only when fewer than `credits` plans before it are not done, so what was sent `credits` plans ago has
arrived. wait() then returns at once on the CPU; with NCCL it only orders streams, after which the allocator may use the
tensor's memory again.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.types.ranks.layout import Layout
from headrace.engine.parallel.carriers import PATIENCE, Carrier, DirectCarrier, Moving, StagedCarrier
from headrace.engine.parallel.groups import Groups, leave_groups
from headrace.engine.row_sampler import FedTokens, Sampling
from headrace.engine.runner import HiddenSpec

RELEASED = -1  # in the place of a released request
TAGS = 1 << 31  # tags of point-to-point messages are below this


class _PendingTokens(NamedTuple):
    """A broadcast of sampled tokens whose result was not used yet."""

    requests: list[int]  # of the feeding rows; RELEASED for released ones
    tokens: Moving  # int64 [feeding rows]


class PipelineLinks:
    """One rank's links to the other ranks of its replica. Used by the compute thread alone.

    Every method raises LinkBroken when another rank is gone. With a single rank no method does anything.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        hidden: HiddenSpec,
        tokens: dist.ProcessGroup | None,
        credits: int,
        carrier: Carrier | None = None,
    ) -> None:
        """hidden: width, dtype and device of hidden states. tokens: group of all ranks of the replica; None where this
        is the only one. credits: plans that may be in flight. carrier: None for tensors that go as they are."""
        place = layout.place(rank)
        self.first = place.stage == 0
        self.last = place.stage == layout.pp - 1
        self._sampler = layout.sampler(place.replica)
        self._samples = rank == self._sampler
        self._embeds_broadcast = self.first and not self._samples  # the sampler knows its own tokens
        self._previous = rank - layout.dp * layout.tp  # same replica and shard; meaningless on the first stage
        self._next = rank + layout.dp * layout.tp
        self._hidden = hidden
        self._credits = credits
        self._carrier = carrier or DirectCarrier(hidden.device)
        self._receives: dict[int, Moving] = {}  # by the plan's seq
        self._sends: deque[Moving] = deque()
        self._tokens: deque[_PendingTokens] = deque()
        self._token_group = tokens

    def post_receive(self, plan: Forward) -> None:
        """Post the receive of a plan's hidden states: once per plan, in plan order, before receive()."""
        if self.first:
            return
        positions = sum(row.count for row in plan.rows)
        shape, dtype = (positions, self._hidden.size), self._hidden.dtype
        self._receives[plan.seq] = self._carrier.receive(shape, dtype, self._previous, plan.seq % TAGS)

    def receive(self, plan: Forward) -> torch.Tensor | None:
        """Wait for a plan's hidden states [tokens, hidden size] from the previous stage; None on the first stage."""
        if self.first:
            return None
        return self._receives.pop(plan.seq).wait(PATIENCE)

    def send(self, plan: Forward, hidden: torch.Tensor) -> int:
        """Send hidden states [tokens, hidden size] to the next stage without waiting for it; the tensor is kept until
        they are known to have arrived. Returns their bytes."""
        hidden = hidden.contiguous()
        while len(self._sends) >= self._credits:
            self._sends.popleft().wait(PATIENCE)
        self._sends.append(self._carrier.send(hidden, self._next, plan.seq % TAGS))
        return hidden.numel() * hidden.element_size()

    def broadcast(self, plan: Forward, sampling: Sampling | None) -> None:
        """Start this rank's part of the broadcast of a plan's sampled tokens, without waiting for it or for them.

        sampling: of the plan on the last stage, elsewhere None. Only rows with `feeds` are broadcast, PLACEHOLDER for
        those without a sample: their requests have failed.
        """
        feeding = [row.request for row in plan.rows if row.feeds]
        if not feeding or self._token_group is None:
            return
        tokens = sampling.fed.of(feeding) if self._samples and sampling is not None else len(feeding)
        while not self._embeds_broadcast and len(self._tokens) >= self._credits:
            self._tokens.popleft().tokens.wait()
        self._tokens.append(_PendingTokens(feeding, self._carrier.broadcast(tokens, self._sampler, self._token_group)))

    def tokens_for(self, rows: Sequence[PlanRow]) -> list[FedTokens]:
        """The tokens of every broadcast up to the newest one that these rows need, oldest first.

        Waits for them; on a GPU the current stream does. Empty on ranks that embed no tokens, or have sampled them.
        """
        wanted = {row.request for row in rows if not row.tokens}
        if not wanted or not self._embeds_broadcast:
            return []
        newest = max((i for i, pending in enumerate(self._tokens) if wanted.intersection(pending.requests)), default=-1)
        found: list[FedTokens] = []
        for _ in range(newest + 1):
            pending = self._tokens.popleft()
            tokens = pending.tokens.wait()
            places = {request: place for place, request in enumerate(pending.requests) if request != RELEASED}
            found.append(FedTokens(places, tokens))
        return found

    def release(self, request: int) -> None:
        """Drop pending tokens of a request that has ended. Its number is never used again."""
        for pending in self._tokens:
            pending.requests[:] = [RELEASED if each == request else each for each in pending.requests]
        while self._tokens and set(self._tokens[0].requests) == {RELEASED}:
            self._tokens.popleft()

    def close(self) -> None:
        """Leave the group."""
        leave_groups()


def carrier(groups: Groups, device: torch.device) -> Carrier:
    """How hidden states and tokens pass between the ranks of these groups."""
    if groups.staged:
        return StagedCarrier(device)
    return DirectCarrier(device, groups.incoming, groups.outgoing, groups.watch)
