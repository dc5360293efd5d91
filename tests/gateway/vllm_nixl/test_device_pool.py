"""The gateway's pool in the memory of a GPU: what decode engines are told of it, and that KV is there before they read.

NIXL is the double of tests/transfer/fake_nixl.py, which refuses what was not registered as it is asked for. The memory
of GPUs is that of the CPU, at addresses that only the double knows what to do with.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.core.config import GatewayConfig
from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.kv.backends import CUDA_IPC, NIXL, SHM, ZMQ, PoolLayout
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.gateway.vllm import assembly
from headrace.gateway.vllm_nixl.engine_probe import ask_side_channel
from headrace.gateway.vllm_nixl.kv_pool import VllmPool, vllm_layout
from headrace.gateway.vllm_nixl.wire import AgentMetadata, HandshakePayload
from headrace.transfer.protocol.layout import pages_for
from tests.engine.kv.fake_cuda import FakeGpus, compiled
from tests.engine.kv.stand_in_device import Device
from tests.gateway.vllm_nixl.engines import engine, metadata
from tests.transfer.backends.test_device_memory import OnGpu
from tests.transfer.fake_nixl import Network, Pieces, on_gpu
from tests.transfer.harness import CONFIG, Pair, gather, random_store, zmq_context

SOURCE = Geometry("float16", 3, 2, 4, 8)
GEOMETRY = msgspec.structs.replace(SOURCE, page_size=16)  # of the decode engine's blocks
PAGES, BLOCK, GPU = 12, 16, 3
BLOCK_BYTES = 2 * BLOCK * 2 * 4 * 2
STAGING, GENERATION, EXPORTER = (
    f"headrace.gateway.{name}" for name in ("vllm.device_staging", "vllm_nixl.agent_generation", "vllm_nixl.exporter")
)
ENGINE = engine(
    geometry=GEOMETRY,
    metadata=metadata(kv_caches_base_addr=(0,) * 3, block_lens=(BLOCK_BYTES,) * 3, block_size=BLOCK),
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device.patched(monkeypatch)


class Gateway:
    """The gateway's modules over a network of doubles, and a pool on a GPU."""

    def __init__(self, network: Network, staging: Any, generation: Any, exporter: Any) -> None:
        self.network = network
        self.staging, self.generation, self.exporter = staging, generation, exporter
        staging.device_memory = lambda pool: on_gpu(pool.memory.numpy(), GPU)

    def pool(self, *backends: str, **arguments: Any) -> VllmPool:
        return VllmPool(
            GEOMETRY, PAGES, partial(self.staging.DeviceStaging, device="cpu", backends=backends, **arguments)
        )


@pytest.fixture
def gateway(device: Device) -> Iterator[Gateway]:
    network = Network()
    with network.imported(STAGING, GENERATION, EXPORTER) as modules:
        yield Gateway(network, *modules)


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq_context() as made:
        yield made


class StockEngine:
    """What a stock NixlConnector does with a handshake (_register_remote_blocks, _read_blocks in vLLM's nixl/), in the
    memory of a GPU of its own."""

    def __init__(self, network: Network, told: AgentMetadata) -> None:
        nixl = network.module()
        self.cache = np.zeros((len(told.block_lens), PAGES, told.block_lens[0]), np.uint8)
        self._agent = nixl.Agent(on_gpu(self.cache.reshape(-1), 1), "")
        self._told = told
        (self._kind,) = set(told.region_mem_types or ())
        self._peer = self._agent.nixl.loadRemoteMD(told.agent_metadata).decode()

    def read(self, blocks: range) -> np.ndarray:
        """These blocks of all regions: [regions, blocks, bytes]."""
        told = self._told
        there = [
            (base + block * stride, size, told.device_id)
            for base, stride, size in zip(told.kv_caches_base_addr, told.block_strides, told.block_lens, strict=True)
            for block in blocks
        ]
        own = [
            (self._agent.address + self.cache[region, block].ctypes.data - self.cache.ctypes.data, size, 1)
            for region, size in enumerate(told.block_lens)
            for block in blocks
        ]
        nixl = self._agent.nixl
        request = nixl.createXferReq("read", Pieces("VRAM", own), Pieces(self._kind, there), self._peer)
        nixl.postXferReq(request)
        while nixl.getXferStatus(request) != "success":
            pass
        return self.cache[:, blocks.start : blocks.stop]


def told_of(payload: bytes) -> AgentMetadata:
    handshake = msgspec.msgpack.decode(payload, type=HandshakePayload)
    return msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=AgentMetadata)


def as_vllm(tokens: np.ndarray) -> np.ndarray:
    """[token, layer, plane, head, bytes] as whole blocks of all regions: [layer, block, bytes], zeros behind them."""
    blocks = ceil_div(len(tokens), BLOCK)
    padded = np.zeros((blocks * BLOCK, *tokens.shape[1:]), np.uint8)
    padded[: len(tokens)] = tokens
    by_block = padded.reshape(blocks, BLOCK, *tokens.shape[1:])
    return by_block.transpose(2, 0, 4, 1, 3, 5).reshape(tokens.shape[1], blocks, -1)


def send(pair: Pair, first: int, tokens: int) -> np.ndarray:
    """Have a prompt handed over into the pool's pages from first on. Returns its KV, token by token."""
    own = list(range(10, 10 + pages_for(SOURCE.page_size, 0, tokens)))
    theirs = list(range(first, first + pages_for(BLOCK, 0, tokens)))
    pair.expect(1, theirs, 0, tokens)
    pair.send(1, 0, 0, tokens, pages=own, dst_pages=theirs, origin=0, last=True)
    return gather(pair.store, SOURCE, own, 0, tokens)


@pytest.mark.parametrize("tokens", [16, 50, 64])
def test_kv_goes_from_gpu_to_gpu_to_gpu(gateway: Gateway, context: Any, tokens: int) -> None:
    """By NIXL: no byte of it is touched by a processor but the zeros behind the prompt."""
    pool = gateway.pool(NIXL)
    assert pool.staging.memory is not None
    source = OnGpu(SOURCE, 1)
    pair = Pair(
        context, SOURCE, GEOMETRY, config=msgspec.structs.replace(CONFIG, backends=(NIXL,)), backend=NIXL,
        store=source, target=pool.staging, memory=pool.staging.memory, registered_pools=pool.staging.registered_pools,
        transports={NIXL: gateway.network.module().NixlTransport(on_gpu(np.asarray(source.memory), 0))},
    )  # fmt: skip
    pool.staging._pool.memory.fill_(255)
    wanted = send(pair, 2, tokens)
    pair.loop.wait_for(pair.receiver, KvReceived, 1)
    assert (
        gateway.network.written["VRAM", "VRAM"] == tokens * SOURCE.token_bytes == sum(gateway.network.written.values())
    )
    pool.zero_tail(2, tokens)
    generation = gateway.generation.AgentGeneration(0, ENGINE, pool, "")
    decode = StockEngine(gateway.network, told_of(generation.payload("hash")))
    assert np.array_equal(decode.read(range(2, 2 + ceil_div(tokens, BLOCK))), as_vllm(wanted))
    generation.end()
    with pytest.raises(Exception, match=r"VRAM 3 at .* is not registered"):
        decode.read(range(2, 3))
    pair.close()
    pool.close()


@pytest.mark.parametrize(("kind", "number"), [("DRAM", 0), ("VRAM", GPU)])
def test_engines_are_told_where_the_pool_is(gateway: Gateway, kind: str, number: int) -> None:
    pool = gateway.pool() if kind == "VRAM" else VllmPool(GEOMETRY, PAGES)
    generation = gateway.generation.AgentGeneration(0, ENGINE, pool, "")
    told = told_of(generation.payload("hash"))
    assert (told.region_mem_types, told.device_id) == ((kind,) * 3, number)
    assert told.kv_caches_base_addr == tuple(generation._agent.address + at for at in pool.region_offsets)
    assert told.block_lens == told.block_strides == (BLOCK_BYTES,) * 3
    assert (told.num_blocks, told.region_num_blocks) == (PAGES, (PAGES,) * 3)
    agent = gateway.network.agents[generation._agent.name]
    assert [(region.kind, region.device, region.size) for region in agent.regions] == [
        (kind, number, pool.layout.bytes)
    ]
    assert ("TLS=^cuda_ipc" in agent.options.split(",")) == (kind == "VRAM"), "nothing takes such a right back"
    generation.end()
    pool.close()


def test_an_offer_is_made_when_the_rest_of_its_block_is_clear(gateway: Gateway, device: Device) -> None:
    pool = gateway.pool()
    exporter = gateway.exporter.KvExporter(ENGINE, pool, gateway.exporter.ExporterOptions(), lambda _: None)
    exporter.start()
    pool.staging._pool.memory.fill_(7)
    assert device.waits == 0
    params = exporter.offer("a", 0, 20)
    assert (device.events, device.waits) == (1, 1)
    payload = ask_side_channel((params["remote_host"], params["remote_port"]))
    told = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
    found = StockEngine(gateway.network, told).read(range(2)).reshape(3, 2, 2, BLOCK, -1)
    assert (found[:, 0] == 7).all()
    assert (found[:, 1, :, :4] == 7).all()
    assert not found[:, 1, :, 4:].any()
    exporter.offer("b", 2, 32)
    assert device.waits == 1, "full blocks have no rest"
    exporter.stop()
    pool.close()


@pytest.mark.parametrize("tokens", [16, 50])
def test_frames_have_come_when_the_device_says_so(gateway: Gateway, device: Device, context: Any, tokens: int) -> None:
    pool = gateway.pool()
    assert pool.staging.memory is None, "prefill servers send frames"
    store = random_store(SOURCE, 64, 1)
    pair = Pair(context, SOURCE, GEOMETRY, backend=ZMQ, store=store, target=pool.staging)
    device.finished = False
    wanted = send(pair, 2, tokens)
    pair.loop.until(lambda: device.events)
    for _ in range(20):
        pair.loop.turn(0.01)
    assert not pair.loop.of(pair.receiver, KvReceived), "a scatter that is queued has not arrived"
    device.finished = True
    pair.loop.wait_for(pair.receiver, KvReceived, 1)
    pool.zero_tail(2, tokens)
    layers = pool.staging._pool.memory.numpy().reshape(3, PAGES, -1)
    assert np.array_equal(layers[:, 2 : 2 + ceil_div(tokens, BLOCK)], as_vllm(wanted))
    assert device.waits == (tokens % BLOCK > 0), "to clear the rest of a block"
    pair.close()
    pool.close()


def test_gpus_of_the_host_write_by_cuda_ipc(gateway: Gateway, tmp_path: Path) -> None:
    gpus = FakeGpus(compiled(tmp_path))
    memory = gpus.allocate(vllm_layout(GEOMETRY, PAGES).bytes)
    gateway.staging.device_memory = lambda _: memory
    pool = gateway.pool(CUDA_IPC, driver=gpus.library)
    shared = pool.staging.memory
    assert shared is not None
    assert shared.cuda_ipc is not None
    assert shared.nixl is None
    assert (shared.cuda_ipc.strides, shared.cuda_ipc.bytes) == (pool.layout.strides, pool.layout.bytes)
    assert set(pool.staging.registered_pools) == {CUDA_IPC}
    pool.close()
    gpus.free()


def test_what_does_not_work_is_said_and_left_out(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    pool = gateway.pool(CUDA_IPC, driver="libno-such-driver.so")
    assert pool.staging.memory is None
    assert "cannot be shared between GPUs of this host (cuda_ipc): libno-such-driver.so" in caplog.text
    pool.close()


def test_a_gateway_makes_it_where_device_says(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def staging(_: Geometry, layout: PoolLayout, device: str, backends: tuple[str, ...]) -> None:
        made.append((layout.pages, device, backends))

    monkeypatch.setattr(gateway.staging, "DeviceStaging", staging)
    monkeypatch.setattr("headrace.gateway.pool_size.available_memory", lambda device: 1 << 30)
    config = GatewayConfig(device="cuda:1", pool_tokens=4 * BLOCK)
    assembly._pool(config, ENGINE, assembly._transfer(config))
    assert made == [(4, "cuda:1", (CUDA_IPC, SHM, NIXL, ZMQ))]
    encrypted = assembly._transfer(GatewayConfig(curve_key="own.key_secret"))
    assert NIXL not in encrypted.backends, "it knows no encryption"
    in_host_memory = assembly._pool(GatewayConfig(pool_tokens=BLOCK), ENGINE, encrypted)
    assert in_host_memory.staging.region().same_host
    in_host_memory.close()
