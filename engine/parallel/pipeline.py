"""Pipeline-parallel communication: hidden states forward, sampled tokens back (torch.distributed, NCCL or Gloo).

    stage 0 ──hidden──► stage 1 ──hidden──► stage 2        point to point, in plan order
       ▲                   ▲                   │
       └───────────────────┴──── tokens ───────┘           broadcast, over a communicator of its own

Shapes follow from the plan, so no metadata is sent. Receives are posted ahead of their turn and sends are never waited
for, so neither neighbour holds the other up. The broadcast has a communicator of its own so that it does not queue
behind hidden states; its result is waited for only when a later plan takes a token from it (about `stages` plans
later). A plan whose rows feed no later row causes no broadcast.
"""

import ipaddress
import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public in torch.distributed, but typed here only

from headrace.core.config import StageConfig
from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.engine.collectives.link import LinkBroken, breakable
from headrace.engine.runner import PLACEHOLDER, HiddenSpec

RELEASED = -1  # in the place of a released request
TAGS = 1 << 31  # tags of point-to-point messages are below this


class _Posted(NamedTuple):
    """A send or receive of hidden states under way."""

    tensor: torch.Tensor  # [tokens, hidden size]
    work: dist.Work


class _PendingTokens(NamedTuple):
    """A broadcast of sampled tokens whose result was not used yet."""

    requests: list[int]  # of the feeding rows; RELEASED for released ones
    tokens: torch.Tensor  # int64 [feeding rows]
    work: dist.Work


def join_group(config: StageConfig, device: torch.device) -> None:
    """Form the group of stages (torch.distributed.init_process_group). Raises LinkBroken when a stage is missing or the
    rendezvous cannot be reached."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.stage_timeout_s)
    try:
        # A store that outlives groups (torchrun hosts one) may hold keys of an earlier group: each has its own prefix.
        store = PrefixStore(f"headrace-{config.epoch}-{config.session}", _store(config, timeout))
        dist.init_process_group(backend, store=store, rank=config.stage, world_size=config.stages, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise LinkBroken(f"the group of stages could not be formed: {error}") from error


def _store(config: StageConfig, timeout: timedelta) -> TCPStore:
    """The rendezvous store at HOST:PORT. Stage 0 opens it, unless a launcher such as torchrun already hosts it."""
    host, _, port = config.rendezvous.rpartition(":")
    host = host.strip("[]")
    opens = config.stage == 0 and not config.rendezvous_hosted
    return TCPStore(
        host, int(port), config.stages, is_master=opens, timeout=timeout, wait_for_workers=False,
        master_listen_fd=_listen(host, int(port)) if opens else None,
    )  # fmt: skip


def _listen(host: str, port: int) -> int | None:
    """A listening socket for the store on this address only; by itself the store would listen on every interface.

    None for a host name: it may resolve to another address on its own machine than on others.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()


class PipelineLinks:
    """One stage's links to the other stages of its group. Used by the compute thread alone.

    Every method raises LinkBroken when another stage is gone. With a single stage no method does anything.
    """

    def __init__(self, stage: int, stages: int, hidden: HiddenSpec, timeout_s: float) -> None:
        """stage: this stage's rank. hidden: width, dtype and device of hidden states. timeout_s: of one broadcast."""
        self.first = stage == 0
        self.last = stage == stages - 1
        self._stage = stage
        self._stages = stages
        self._hidden = hidden
        self._receives: dict[int, _Posted] = {}  # by the plan's seq
        self._sends: deque[_Posted] = deque()
        self._tokens: deque[_PendingTokens] = deque()
        self._token_group: dist.ProcessGroup | None = None
        if stages > 1:
            with breakable():
                self._token_group = dist.new_group(timeout=timedelta(seconds=timeout_s))

    def post_receive(self, plan: Forward) -> None:
        """Post the receive of a plan's hidden states: once per plan, in plan order, before receive()."""
        if self.first:
            return
        positions = sum(row.count for row in plan.rows)
        hidden = torch.empty((positions, self._hidden.size), dtype=self._hidden.dtype, device=self._hidden.device)
        with breakable():
            self._receives[plan.seq] = _Posted(hidden, _work(dist.irecv(hidden, self._stage - 1, tag=plan.seq % TAGS)))

    def receive(self, plan: Forward) -> torch.Tensor | None:
        """Wait for a plan's hidden states [tokens, hidden size] from the previous stage; None on the first stage."""
        if self.first:
            return None
        posted = self._receives.pop(plan.seq)
        with breakable():
            posted.work.wait()
        return posted.tensor

    def send(self, plan: Forward, hidden: torch.Tensor) -> int:
        """Send hidden states [tokens, hidden size] to the next stage without waiting; the tensor is kept until they are
        sent. Returns their bytes."""
        hidden = hidden.contiguous()
        with breakable():
            self._sends.append(_Posted(hidden, _work(dist.isend(hidden, self._stage + 1, tag=plan.seq % TAGS))))
            while self._sends and self._sends[0].work.is_completed():
                self._sends.popleft()
        return hidden.numel() * hidden.element_size()

    def broadcast(self, plan: Forward, samples: Sequence[SampledToken]) -> None:
        """Start this stage's part of the broadcast of a plan's sampled tokens, without waiting for it.

        samples: on the last stage the plan's samples, elsewhere empty. Only rows with `feeds` are broadcast,
        PLACEHOLDER for those without a sample: their requests have failed.
        """
        feeding = [row.request for row in plan.rows if row.feeds]
        if not feeding or self._stages == 1:
            return
        by_request = {sample.request: sample.token for sample in samples}
        values = [by_request.get(request, PLACEHOLDER) for request in feeding]
        tokens = torch.tensor(values, dtype=torch.int64, device=self._hidden.device)
        with breakable():
            work = _work(dist.broadcast(tokens, src=self._stages - 1, group=self._token_group, async_op=True))
            self._tokens.append(_PendingTokens(feeding, tokens, work))
            while not self.first and self._tokens and self._tokens[0].work.is_completed():
                self._tokens.popleft()  # only the first stage embeds tokens

    def tokens_for(self, rows: Sequence[PlanRow]) -> list[tuple[int, int]]:
        """(request, token) of every broadcast up to the newest one that these rows need, oldest first.

        Waits for them. Empty on all stages but the first, which alone embeds tokens.
        """
        wanted = {row.request for row in rows if not row.tokens}
        if not wanted or not self.first:
            return []
        newest = max((i for i, pending in enumerate(self._tokens) if wanted.intersection(pending.requests)), default=-1)
        found: list[tuple[int, int]] = []
        for _ in range(newest + 1):
            pending = self._tokens.popleft()
            with breakable():
                pending.work.wait()
            found.extend(zip(pending.requests, pending.tokens.tolist(), strict=True))
        return [(request, token) for request, token in found if request != RELEASED]

    def release(self, request: int) -> None:
        """Drop pending tokens of a request that has ended. Its number is never used again."""
        for pending in self._tokens:
            pending.requests[:] = [RELEASED if each == request else each for each in pending.requests]
        while self._tokens and set(self._tokens[0].requests) == {RELEASED}:
            self._tokens.popleft()

    def close(self) -> None:
        """Leave the group."""
        if self._stages > 1:
            dist.destroy_process_group()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work
