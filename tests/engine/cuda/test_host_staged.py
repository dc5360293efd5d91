"""Links through host memory on a GPU: what is sent was computed, what is read has come, and who waits for what."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.host_staged import HostStaged, on_host
from headrace.engine.collectives.operations import Done
from headrace.engine.parallel import carriers
from headrace.engine.parallel.carriers import StagedCarrier
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.row_sampler import FedTokens, Sampling
from headrace.engine.runner import HiddenSpec
from tests.engine.cuda.clocks import HOST
from tests.engine.cuda.fake_gpu import FakeGpu, current
from tests.engine.parallel.test_pipeline_links import plan, taking

DEVICE = torch.device("cuda:0")
SPEC = HiddenSpec(64, torch.bfloat16, DEVICE)
ROWS = 8


class Sending:
    """Stands in for the thread that sends: it comes to its work when run() is called."""

    made: ClassVar[list["Sending"]] = []

    def __init__(self, *_: object) -> None:
        self._work: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.made.append(self)

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._work.append((work, future))
        return future

    def run(self) -> None:
        for work, future in self._work:
            future.set_result(work())
        self._work.clear()


class Work:
    """An operation of the host under way; what it receives is written at the wait."""

    def __init__(self, received: Tensor | None = None) -> None:
        self._received = received

    def wait(self, _: object = None) -> None:
        if self._received is not None:
            self._received.zero_()


class Hosts:
    """Stands in for torch.distributed over Gloo, which reads and writes host memory only."""

    ProcessGroup = object

    def isend(self, tensor: Tensor, *_: object, **__: object) -> Work:
        self._read(tensor)
        return Work()

    def irecv(self, tensor: Tensor, *_: object, **__: object) -> Work:
        assert tensor.device.type == "cpu"
        return Work(tensor)

    def broadcast(self, tensor: Tensor, src: int, **_: object) -> Work:
        if src == 1:
            self._read(tensor)
        return Work(tensor if src != 1 else None)

    @staticmethod
    def _read(tensor: Tensor) -> None:
        assert tensor.device.type == "cpu"
        current().host_reads(tensor)


@pytest.fixture(autouse=True)
def sending(monkeypatch: pytest.MonkeyPatch) -> list[Sending]:
    monkeypatch.setattr(carriers, "dist", Hosts())
    monkeypatch.setattr(carriers, "ThreadPoolExecutor", Sending)
    monkeypatch.setattr(Sending, "made", [])
    return Sending.made


def links(rank: int) -> PipelineLinks:
    return PipelineLinks(Layout(2, 1, 1), rank, SPEC, "tokens", 2, StagedCarrier(DEVICE))  # type: ignore[arg-type]


def computed() -> Tensor:
    """Hidden states that the device has yet to compute."""
    return torch.ones(ROWS, SPEC.size, dtype=SPEC.dtype, device=DEVICE) * 2


def test_hidden_states_are_sent_after_they_were_computed(gpu: FakeGpu, sending: list[Sending]) -> None:
    with gpu, gpu.counted() as counts:
        stage = links(0)
        for seq in (1, 2):
            stage.send(plan(seq, 10, count=ROWS), computed())
        assert not counts.syncs, counts.described()
        assert counts.copied == {"d2h pinned": 2 * ROWS * SPEC.size * 2}
        sending[0].run()
        assert counts.syncs.total() == 2, "in the thread that sends"


def test_a_send_that_does_not_wait_for_the_copy_is_found(
    guard: str, sending: list[Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = carriers.begin_host_copy
    monkeypatch.setattr(carriers, "begin_host_copy", lambda tensor: (begin(tensor)[0], None))
    gpu = FakeGpu(guard)
    with gpu:
        links(0).send(plan(1, 10, count=ROWS), computed())
        sending[0].run()
    assert any(race.second.agent == HOST and race.what == "read after write" for race in gpu.races), gpu.races


def test_the_copy_to_the_device_is_before_the_layer_that_reads_it(gpu: FakeGpu) -> None:
    """The host waits for no device: the layers of the plan before go on."""
    turn = plan(1, 10, count=ROWS)
    with gpu, gpu.counted() as counts:
        stage = links(1)
        stage.post_receive(turn)
        computed()
        hidden = stage.receive(turn)
        assert hidden is not None
        assert (hidden.device, hidden.dtype, tuple(hidden.shape)) == (DEVICE, SPEC.dtype, (ROWS, SPEC.size))
        hidden + 1
    assert not counts.syncs, counts.described()
    assert counts.copied == {"h2d pinned": ROWS * SPEC.size * 2}


def test_a_copy_on_another_stream_would_be_found(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_device = carriers.to_device

    def aside(host: Tensor, device: torch.device) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            return to_device(host, device)

    monkeypatch.setattr(carriers, "to_device", aside)
    turn, gpu = plan(1, 10, count=ROWS), FakeGpu(guard)
    with gpu:
        stage = links(1)
        stage.post_receive(turn)
        hidden = stage.receive(turn)
        assert hidden is not None
        hidden + 1
    assert gpu.races


def test_tokens_go_and_come_without_a_wait_for_the_device(gpu: FakeGpu, sending: list[Sending]) -> None:
    turn = plan(1, 10)
    with gpu, gpu.counted() as counts:
        drawn = FedTokens({10: 0}, torch.ones(1, dtype=torch.int64, device=DEVICE))
        links(1).broadcast(turn, Sampling(drawn, lambda _sampling: None))
        first = links(0)
        first.broadcast(turn, None)
        [fed] = first.tokens_for(taking(10))
        assert fed.tokens.device == DEVICE
        fed.tokens + 1
        assert not counts.syncs, counts.described()
        sending[0].run()


class Summing:
    """Collectives of hosts."""

    size, rank = 2, 0

    def all_reduce(self, x: Tensor) -> Done:
        assert x.device.type == "cpu"
        current().host_reads(x)
        return Done(x)

    def all_gather(self, x: Tensor) -> Done:
        current().host_reads(x)
        return Done(torch.cat([x, x]))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Done:
        current().host_reads(x)
        return Done(x.new_zeros(sum(received), *x.shape[1:]))

    reduce_scatter = broadcast = gather = all_reduce


def test_a_collective_waits_for_the_device_once_and_the_device_for_its_result(gpu: FakeGpu) -> None:
    with gpu:
        group = HostStaged(Summing())  # type: ignore[arg-type]
        x = computed()
        for begin in (group.all_reduce, group.all_gather, lambda x: group.all_to_all(x, [4, 4], [3, 2])):
            with gpu.counted() as counts:
                result = begin(x).wait()
                assert result.device == DEVICE
                result + 1
            assert counts.syncs.total() == 1, counts.described()
            assert set(counts.copied) == {"d2h pinned", "h2d pinned"}


def test_a_copy_to_the_host_is_complete(gpu: FakeGpu) -> None:
    with gpu:
        gpu.host_reads(on_host(computed()))
