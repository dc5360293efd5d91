"""How hidden states and tokens of a pipeline pass between ranks: as they are, or through host memory.

DirectCarrier   tensor ───────────── NCCL, or Gloo on the CPU ────────────────► tensor
StagedCarrier   tensor ──copy──► pinned memory ──Gloo──► pinned memory ──copy──► tensor
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.engine.collectives.host_staged import begin_host_copy, to_device
from headrace.engine.collectives.operations import breakable
from headrace.engine.collectives.torch_collectives import begun
from headrace.engine.collectives.watch import OperationWatch

PATIENCE = timedelta(days=1)  # for hidden states: the scheduler knows a hang from a long pass


class Moving(Protocol):
    """A tensor on its way."""

    def wait(self, patience: timedelta | None = None) -> Tensor:
        """The tensor, once it has come, or gone; call it once. On a GPU the current stream may be what waits.

        patience: None for the timeout of the group. Raises LinkBroken when another rank is gone.
        """
        ...


class Carrier(Protocol):
    """One rank's way to other ranks. Used by the compute thread alone. Every method raises LinkBroken when a rank is
    gone."""

    def send(self, tensor: Tensor, rank: int, tag: int) -> Moving:
        """Begin to send a tensor, which must stay as it is until the wait."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int, tag: int) -> Moving:
        """Begin to receive a tensor."""
        ...

    def broadcast(self, tokens: Tensor | int, source: int, group: dist.ProcessGroup) -> Moving:
        """Begin this rank's part of a broadcast of tokens, int64. tokens: at their source the tensor; how many they are
        elsewhere."""
        ...


class _Going(NamedTuple):
    """A tensor on its way as it is."""

    tensor: Tensor
    work: dist.Work

    def wait(self, patience: timedelta | None = None) -> Tensor:
        """See Moving."""
        with breakable():
            if patience is None or self.tensor.device.type != "cpu":
                self.work.wait()
            else:
                self.work.wait(patience)
        return self.tensor


class DirectCarrier:
    """Tensors as they are."""

    def __init__(
        self,
        device: torch.device,
        incoming: dist.ProcessGroup | None = None,
        outgoing: dist.ProcessGroup | None = None,
        watch: OperationWatch | None = None,
    ) -> None:
        """device: of the tensors. incoming, outgoing, watch: see Groups."""
        self._device = device
        self._incoming = incoming
        self._outgoing = outgoing
        self._watch = watch

    def send(self, tensor: Tensor, rank: int, tag: int) -> _Going:
        """See Carrier."""
        with breakable():
            work = dist.isend(tensor, rank, group=self._outgoing, tag=tag)
        return self._going(f"send to rank {rank}", "hidden states", work, tensor)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int, tag: int) -> _Going:
        """See Carrier."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        with breakable():
            work = dist.irecv(tensor, rank, group=self._incoming, tag=tag)
        return self._going(f"receive from rank {rank}", "hidden states", work, tensor)

    def broadcast(self, tokens: Tensor | int, source: int, group: dist.ProcessGroup) -> _Going:
        """See Carrier."""
        if isinstance(tokens, int):
            tokens = torch.empty(tokens, dtype=torch.int64, device=self._device)
        with breakable():
            work = dist.broadcast(tokens, src=source, group=group, async_op=True)
        return self._going("broadcast", "tokens", work, tokens)

    def _going(self, operation: str, what: str, work: dist.Work | None, tensor: Tensor) -> _Going:
        going = _Going(tensor, begun(work))
        if self._watch is not None:
            self._watch.add(operation, what, going.work)
        return going


class _Leaving(NamedTuple):
    """A tensor that is sent once it is in host memory."""

    going: Future[_Going]

    def wait(self, patience: timedelta | None = None) -> Tensor:
        """See Moving. Returns the copy: the tensor itself may end before, behind it on its stream."""
        with breakable():
            going = self.going.result()
        return going.wait(patience)


class _Arriving(NamedTuple):
    """A tensor that comes to host memory."""

    going: _Going
    device: torch.device

    def wait(self, patience: timedelta | None = None) -> Tensor:
        """See Moving."""
        return to_device(self.going.wait(patience), self.device)


class StagedCarrier:
    """Tensors through pinned host memory, over Gloo.

    What is sent is copied behind the computation that makes it; a thread waits for the copy, and begins the send. So
    the compute thread queues the next plan meanwhile, for the price of a thread that wakes up for each send. It does
    wait for what it receives, as on a CPU, and queues the copy to the device before the layers that read it: these
    begin later than with NCCL by the time that it takes to queue them.
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the tensors."""
        self._device = device
        self._host = DirectCarrier(torch.device("cpu"))
        self._sending = ThreadPoolExecutor(1, "host-sends")  # one: sends and broadcasts begin in their order

    def send(self, tensor: Tensor, rank: int, tag: int) -> _Leaving:
        """See Carrier."""
        return self._leave(tensor, lambda host: self._host.send(host, rank, tag))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int, tag: int) -> _Arriving:
        """See Carrier."""
        host = self._pinned(shape, dtype)
        with breakable():
            return _Arriving(_Going(host, begun(dist.irecv(host, rank, tag=tag))), self._device)

    def broadcast(self, tokens: Tensor | int, source: int, group: dist.ProcessGroup) -> Moving:
        """See Carrier."""
        if not isinstance(tokens, int):
            return self._leave(tokens, lambda host: self._host.broadcast(host, source, group))
        host = self._pinned((tokens,), torch.int64)
        return _Arriving(self._host.broadcast(host, source, group), self._device)

    def _leave(self, tensor: Tensor, send: Callable[[Tensor], _Going]) -> _Leaving:
        host, copied = begin_host_copy(tensor)

        def begin() -> _Going:
            if copied is not None:
                copied.synchronize()
            return send(host)

        return _Leaving(self._sending.submit(begin))

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._device.type == "cuda")
