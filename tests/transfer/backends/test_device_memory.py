"""KV in the memory of GPUs through NIXL: from where it is to where it is to be, and no byte of it is touched here."""

import logging
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.kv.backends import NIXL, PoolMemory
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.transfer.backends.strided_pool import ArrayPageStore, StridedPool, c_order
from headrace.transfer.protocol.layout import pages_for
from tests.transfer.fake_nixl import ADDED, Network, on_gpu
from tests.transfer.harness import CONFIG, Pair, gather, random_store, value

PAGES = 32
SOURCE = Geometry("float16", 3, 2, 4, 8)
SMALL = Geometry("float16", 3, 2, 4, 4)
LATENT = Component("latent", "float32", layers=2, kv_heads=1, head_dim=3, planes=1)


class OnGpu(ArrayPageStore):
    """A pool of a GPU, which nothing here reads or writes for a checksum or a frame."""

    on_device = True
    gpu = 0

    def in_place(self) -> StridedPool:
        memory = on_gpu(np.asarray(self.memory), self.gpu).array()
        return StridedPool(self.geometry, c_order(self.geometry, PAGES), memory)

    def read(self, *_: Any) -> Any:
        raise AssertionError("read by the processor")

    def __init__(self, geometry: Geometry, seed: int) -> None:
        super().__init__(geometry, PAGES)
        self.geometry = geometry
        for name, data in random_store(geometry, PAGES, seed).tensors.items():
            self.tensors[name][:] = data


def connect(context: Any, source: ArrayPageStore, target: ArrayPageStore, network: Network, **config: Any) -> Pair:
    nixl = network.module()

    def memory_of(store: ArrayPageStore, device: int) -> Any:
        return on_gpu(np.asarray(store.memory), device) if store.on_device else memoryview(store.memory)

    registered = nixl.NixlRegisteredPool(c_order(target.geometry, PAGES), memory_of(target, 5))
    return Pair(
        context, source.geometry, target.geometry, config=replace(CONFIG, backends=(NIXL,)), backend=NIXL,
        store=source, target=target, transports={NIXL: nixl.NixlTransport(memory_of(source, 0))},
        registered_pools={NIXL: registered}, memory=PoolMemory(nixl=registered.memory), **config,
    )  # fmt: skip


def in_host_memory(geometry: Geometry, seed: int) -> ArrayPageStore:
    store = random_store(geometry, PAGES, seed)
    store.geometry = geometry
    return store


def fetch(pair: Pair, start: int = 3, count: int = 50) -> None:
    """A request in one chunk, checked."""
    pages = list(range(10, 10 + pages_for(pair.source.page_size, start, count)))
    theirs = list(range(30, 30 - pages_for(pair.destination.page_size, start, count), -1))
    pair.expect(1, theirs, start, count)
    pair.send(1, 0, start, count, pages=pages, dst_pages=theirs, origin=start, last=True)
    pair.loop.wait_for(pair.receiver, KvReceived, 1)
    for tensor in pair.source.tensors:
        sent = gather(pair.store, pair.source, pages, start, count, tensor.name)
        assert np.array_equal(gather(pair.target, pair.destination, theirs, start, count, tensor.name), sent)


@pytest.mark.parametrize("target", [SOURCE, SMALL, replace(SOURCE, components=(LATENT,))])
def test_kv_goes_from_gpu_to_gpu(context: Any, target: Geometry) -> None:
    network = Network()
    source = replace(SOURCE, components=target.components)
    pair = connect(context, OnGpu(source, 1), OnGpu(target, 2), network)
    fetch(pair)
    assert network.written["VRAM", "VRAM"] == 50 * source.token_bytes == sum(network.written.values())
    assert value(pair.receiver.statistics(), "bytes_received_total", (NIXL,)) == 50 * source.token_bytes
    pair.close()


def test_kv_goes_from_a_cpu_to_a_gpu(context: Any) -> None:
    network = Network()
    pair = connect(context, in_host_memory(SOURCE, 1), OnGpu(SMALL, 2), network)
    fetch(pair)
    assert network.written["DRAM", "VRAM"] == 50 * SOURCE.token_bytes
    pair.close()


def test_kv_goes_from_a_gpu_to_a_cpu_that_asks_for_no_checksums(context: Any) -> None:
    network = Network()
    unchecked = replace(CONFIG, backends=(NIXL,), checksum=False)
    pair = connect(context, OnGpu(SOURCE, 1), in_host_memory(SMALL, 2), network, receiver_config=unchecked)
    fetch(pair)
    assert network.written["VRAM", "DRAM"] == 50 * SOURCE.token_bytes
    pair.close()


def test_kv_goes_in_frames_where_the_peer_asks_for_checksums(
    context: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network()
    monkeypatch.setattr(OnGpu, "read", ArrayPageStore.read)
    with caplog.at_level(logging.WARNING):
        pair = connect(context, OnGpu(SOURCE, 1), in_host_memory(SMALL, 2), network)
        fetch(pair)
    assert not any(network.written.values())
    assert "asks for checksums, which the memory of a GPU has not (--no-checksum there)" in caplog.text
    pair.close()


def test_transports_that_nothing_takes_a_right_back_from_are_off() -> None:
    """A process that writes through CUDA IPC goes on when the owner's agent is gone."""
    network = Network()
    registered = network.module().NixlRegisteredPool(c_order(SOURCE, PAGES), on_gpu(np.zeros(1 << 16, np.uint8), 3))
    [agent] = network.agents.values()
    assert "TLS=^cuda_ipc" in agent.options.split(",")
    assert (registered.memory.device, registered.grant("s").address >= ADDED) == (3, True)
    registered.close()
    assert not agent.regions
