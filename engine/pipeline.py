"""What stages pass to each other: hidden states forward, sampled tokens back (torch.distributed).

    stage 0 ──hidden──► stage 1 ──hidden──► stage 2        point to point, in plan order
       ▲                   ▲                   │
       └───────────────────┴──── tokens ───────┘           broadcast, over a communicator of its own

Shapes follow from the plan, so nothing but the numbers travels. Receives are posted ahead of their turn and sends are
never waited for, so neither neighbour holds the other up. The broadcast has its own communicator so that it does not
queue behind hidden states; its result is waited for only when a later plan feeds on a token (about `stages` plans
later). A plan whose rows feed no later one causes no broadcast.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from core.orders import Row, Sampled


class _Posted(NamedTuple):
    seq: int
    tensor: torch.Tensor
    work: dist.Work


class _PendingTokens(NamedTuple):
    requests: tuple[int, ...]
    tokens: torch.Tensor  # [feeding rows] int64
    work: dist.Work


class PipelineLinks:
    """One stage's ends of the links. Used by the compute thread alone.

    hidden_size: elements per token position. Raises RuntimeError from any call when a neighbour is gone; a group
    that lost a member cannot go on, and all of it is started again.
    """

    def __init__(
        self, *, stage: int, stages: int, hidden_size: int, dtype: torch.dtype, device: torch.device, timeout_s: float
    ) -> None:
        self.stage = stage
        self.stages = stages
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._receives: deque[_Posted] = deque()
        self._sends: deque[_Posted] = deque()
        self._tokens: deque[_PendingTokens] = deque()
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, init_method="env://", rank=stage, world_size=stages, timeout=timeout)
        self._token_group = dist.new_group(backend=backend, timeout=timeout)
        self.hidden_bytes = 0

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def expect(self, seq: int, rows: Sequence[Row]) -> None:
        """Post the receive of a plan's hidden states; called once per plan, in plan order, ahead of take()."""
        if self.first:
            return
        hidden = torch.empty(
            (sum(row.count for row in rows), self._hidden_size), dtype=self._dtype, device=self._device
        )
        work = dist.irecv(hidden, src=self.stage - 1)
        assert work is not None  # this process is in the group
        self._receives.append(_Posted(seq, hidden, work))

    def expected(self, seq: int) -> bool:
        """Whether expect() was called for this plan."""
        return self.first or any(posted.seq == seq for posted in self._receives)

    def take(self, seq: int) -> torch.Tensor | None:
        """Hidden states [positions, hidden_size] of a plan from the stage before; None at the first stage."""
        if self.first:
            return None
        posted = self._receives.popleft()
        assert posted.seq == seq, f"plan {seq} is due, hidden states of plan {posted.seq} come next"
        posted.work.wait()
        return posted.tensor

    def pass_on(self, seq: int, hidden: torch.Tensor) -> None:
        """Send hidden states to the next stage without waiting; the buffer is kept until they have left."""
        hidden = hidden.contiguous()
        work = dist.isend(hidden, dst=self.stage + 1)
        assert work is not None
        self._sends.append(_Posted(seq, hidden, work))
        self.hidden_bytes += hidden.numel() * hidden.element_size()
        while self._sends and self._sends[0].work.is_completed():
            self._sends.popleft()

    def share(self, rows: Sequence[Row], samples: Sequence[Sampled]) -> None:
        """Take part in the broadcast of a plan's sampled tokens, without waiting for it.

        The last stage gives samples (one per sampling row, in row order); the others give none.
        """
        feeding = tuple(row.request for row in rows if row.feeds)
        if not feeding or self.stages == 1:
            return
        by_request = {sample.request: sample.token for sample in samples}
        values = [by_request[request] for request in feeding] if self.last else [0] * len(feeding)
        tokens = torch.tensor(values, dtype=torch.int64, device=self._device)
        work = dist.broadcast(tokens, src=self.stages - 1, group=self._token_group, async_op=True)
        assert work is not None
        self._tokens.append(_PendingTokens(feeding, tokens, work))

    def tokens_for(self, requests: set[int]) -> list[tuple[int, int]]:
        """(request, token) of every broadcast up to the newest one that names any of these requests, oldest first.

        Waits only for those. Tokens of requests that were released meanwhile are the caller's to drop: request
        numbers are never used twice, so a stale one finds no row.
        """
        newest = max((i for i, pending in enumerate(self._tokens) if requests & set(pending.requests)), default=-1)
        found: list[tuple[int, int]] = []
        for _ in range(newest + 1):
            pending = self._tokens.popleft()
            pending.work.wait()
            found.extend(zip(pending.requests, pending.tokens.tolist(), strict=True))
        return found

    def close(self) -> None:
        dist.destroy_process_group()
