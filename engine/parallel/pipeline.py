"""What stages pass to each other: hidden states forward, sampled tokens back (torch.distributed).

    stage 0 ──hidden──► stage 1 ──hidden──► stage 2        point to point, in plan order
       ▲                   ▲                   │
       └───────────────────┴──── tokens ───────┘           broadcast, over a communicator of its own

Shapes follow from the plan, so nothing but the numbers travels. Receives are posted ahead of their turn and sends are
never waited for, so neither neighbour holds the other up. The broadcast has its own communicator so that it does not
queue behind hidden states; its result is waited for only when a later plan feeds on a token (about `stages` plans
later). A plan whose rows feed no later one causes no broadcast.
"""

import ipaddress
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public in torch.distributed, but typed here only

from headrace.core.config import StageConfig
from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.engine.runner import Hidden

RELEASED = -1
TAGS = 1 << 31


class _Posted(NamedTuple):
    tensor: torch.Tensor
    work: dist.Work


class _PendingTokens(NamedTuple):
    requests: list[int]  # RELEASED in the place of those that are
    tokens: torch.Tensor  # [feeding rows] int64
    work: dist.Work


class LinkBroken(Exception):
    """A neighbour is gone. The group cannot go on, and all of it is started again."""


def join_group(config: StageConfig, device: torch.device) -> None:
    """Meet the other stages at the rendezvous. Raises LinkBroken when they do not come together."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.stage_timeout_s)
    try:
        # Whoever hosts the store may have hosted it for an earlier group, and what that one has left must not be read.
        store = PrefixStore(f"headrace-{config.epoch}-{config.session}", _store(config, timeout))
        dist.init_process_group(backend, store=store, rank=config.stage, world_size=config.stages, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise LinkBroken(f"the stages did not find together: {error}") from error


def _store(config: StageConfig, timeout: timedelta) -> TCPStore:
    """The store at HOST:PORT, which stage 0 opens unless somebody else does."""
    host, _, port = config.rendezvous.rpartition(":")
    host = host.strip("[]")
    opens = config.stage == 0 and not config.rendezvous_hosted
    return TCPStore(
        host, int(port), config.stages, is_master=opens, timeout=timeout, wait_for_workers=False,
        master_listen_fd=_listen(host, int(port)) if opens else None,
    )  # fmt: skip


def _listen(host: str, port: int) -> int | None:
    """A listening socket for the store, which left to itself listens on every interface. None for a name: that may
    mean another address on its own machine than on others."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()


class PipelineLinks:
    """One stage's ends of the links, in a group of stages that has come together. Used by the compute thread alone.

    Any call raises LinkBroken when a neighbour is gone. With a single stage there is nothing to link.
    """

    def __init__(self, stage: int, stages: int, hidden: Hidden, timeout_s: float) -> None:
        self.first = stage == 0
        self.last = stage == stages - 1
        self._stage = stage
        self._stages = stages
        self._hidden = hidden
        self._receives: dict[int, _Posted] = {}
        self._sends: deque[_Posted] = deque()
        self._tokens: deque[_PendingTokens] = deque()
        self._token_group: dist.ProcessGroup | None = None
        if stages > 1:
            with _breakable():
                self._token_group = dist.new_group(timeout=timedelta(seconds=timeout_s))

    def expect(self, plan: Forward) -> None:
        """Post the receive of a plan's hidden states; once per plan, in plan order, ahead of take()."""
        if self.first:
            return
        positions = sum(row.count for row in plan.rows)
        hidden = torch.empty((positions, self._hidden.size), dtype=self._hidden.dtype, device=self._hidden.device)
        with _breakable():
            self._receives[plan.seq] = _Posted(hidden, _work(dist.irecv(hidden, self._stage - 1, tag=plan.seq % TAGS)))

    def take(self, plan: Forward) -> torch.Tensor | None:
        """Wait for a plan's hidden states [positions, hidden] from the stage before; None at the first stage."""
        if self.first:
            return None
        posted = self._receives.pop(plan.seq)
        with _breakable():
            posted.work.wait()
        return posted.tensor

    def pass_on(self, plan: Forward, hidden: torch.Tensor) -> int:
        """Send hidden states to the next stage without waiting; the buffer is kept until they have left.
        Returns their bytes."""
        hidden = hidden.contiguous()
        with _breakable():
            self._sends.append(_Posted(hidden, _work(dist.isend(hidden, self._stage + 1, tag=plan.seq % TAGS))))
            while self._sends and self._sends[0].work.is_completed():
                self._sends.popleft()
        return hidden.numel() * hidden.element_size()

    def share(self, plan: Forward, samples: Sequence[SampledToken]) -> None:
        """Take part in the broadcast of a plan's sampled tokens, without waiting for it.

        The last stage gives the samples; the others give none. Rows that feed no later one take no part.
        """
        feeding = [row.request for row in plan.rows if row.feeds]
        if not feeding or self._stages == 1:
            return
        by_request = {sample.request: sample.token for sample in samples}
        values = [by_request[request] if self.last else 0 for request in feeding]
        tokens = torch.tensor(values, dtype=torch.int64, device=self._hidden.device)
        with _breakable():
            work = _work(dist.broadcast(tokens, src=self._stages - 1, group=self._token_group, async_op=True))
            self._tokens.append(_PendingTokens(feeding, tokens, work))
            while not self.first and self._tokens and self._tokens[0].work.is_completed():
                self._tokens.popleft()  # only the first stage embeds tokens

    def tokens_for(self, rows: Sequence[PlanRow]) -> list[tuple[int, int]]:
        """(request, token) of every broadcast up to the newest one that these rows go on with, oldest first.

        Waits for those. Only the first stage embeds tokens, so the others get none.
        """
        wanted = {row.request for row in rows if not row.tokens}
        if not wanted or not self.first:
            return []
        newest = max((i for i, pending in enumerate(self._tokens) if wanted.intersection(pending.requests)), default=-1)
        found: list[tuple[int, int]] = []
        for _ in range(newest + 1):
            pending = self._tokens.popleft()
            with _breakable():
                pending.work.wait()
            found.extend(zip(pending.requests, pending.tokens.tolist(), strict=True))
        return [(request, token) for request, token in found if request != RELEASED]

    def release(self, request: int) -> None:
        """Drop the tokens of a request that nobody will ask for. Its number is never used again."""
        for pending in self._tokens:
            pending.requests[:] = [RELEASED if each == request else each for each in pending.requests]
        while self._tokens and set(self._tokens[0].requests) == {RELEASED}:
            self._tokens.popleft()

    def close(self) -> None:
        if self._stages > 1:
            dist.destroy_process_group()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work


@contextmanager
def _breakable() -> Iterator[None]:
    """torch.distributed raises RuntimeError, in words that differ by backend, when the other end is gone."""
    try:
        yield
    except RuntimeError as error:
        raise LinkBroken(str(error)) from error
