"""KvMemory: which stages share their pool, and that the engine reads what peers write into it."""

import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.config import EngineConfig, ModelConfig, Role, StageConfig, TransferConfig
from headrace.core.types.kv.backends import FAKE, NIXL, SHM, ZMQ
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.kv_memory import KvMemory
from headrace.engine.kv.pool import KVPool
from headrace.transfer.backends.shm import ShmTransport
from headrace.transfer.backends.writer_locks import FOLDER, host_token

pytestmark = pytest.mark.skipif(not host_token(), reason="no shared memory here")

GEOMETRY = Geometry("bfloat16", layers=3, kv_heads=2, head_dim=4, page_size=8)
DECODE = StageConfig(
    rank=0,
    endpoint="",
    model=ModelConfig(device="cpu"),
    engine=EngineConfig(),
    transfer=TransferConfig(backends=(SHM, ZMQ)),
    role="decode",
)


@pytest.fixture
def kv_memory() -> Iterator[KvMemory]:
    made = KvMemory(DECODE)
    yield made
    made.close()


def test_what_a_prefill_stage_writes_is_what_the_engine_reads(kv_memory: KvMemory) -> None:
    pool = KVPool(GEOMETRY, 5, "cpu", kv_memory.allocate)
    assert kv_memory.backends == (SHM, ZMQ)
    assert kv_memory.pool_memory is not None
    pages = ShmTransport().open("s" * 32, 0, GEOMETRY, kv_memory.pool_memory)
    values = torch.randn(3, 2, 2, 8, 4).to(torch.bfloat16)
    pages.write(4, 0, 8, values.view(torch.uint8).numpy())
    assert torch.equal(pool.tensor[4], values)
    assert np.array_equal(pool.read(4, 0, 8), values.view(torch.uint8).numpy())
    pages.close()


@pytest.mark.parametrize(
    ("config", "backends"),
    [
        (replace(DECODE, role="prefill"), (SHM, ZMQ)),
        (replace(DECODE, transfer=TransferConfig(backends=(ZMQ,))), (ZMQ,)),
        (replace(DECODE, transfer=TransferConfig(backends=(ZMQ, FAKE))), (ZMQ, FAKE)),
        (replace(DECODE, model=ModelConfig(device="cuda")), (ZMQ,)),
    ],
)
def test_a_pool_that_peers_do_not_write_is_not_shared(config: StageConfig, backends: tuple[str, ...]) -> None:
    kv_memory = KvMemory(config)
    before = set(FOLDER.iterdir())
    assert kv_memory.allocate(GEOMETRY, 5) is None
    assert kv_memory.pool_memory is None
    assert set(FOLDER.iterdir()) == before
    assert kv_memory.backends == backends


@pytest.mark.parametrize(
    ("role", "device"), [("prefill", "cpu"), ("decode", "cpu"), ("prefill", "cuda"), ("decode", "cuda")]
)
def test_nixl_that_is_not_there_is_not_offered_and_the_log_says_so(
    role: Role, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "headrace.transfer.backends.nixl", raising=False)
    transfer = TransferConfig(backends=(NIXL, ZMQ))
    kv_memory = KvMemory(replace(DECODE, role=role, model=ModelConfig(device=device), transfer=transfer))
    with caplog.at_level(logging.WARNING):
        memory = kv_memory.allocate(GEOMETRY, 5)
        kv_memory.register(KVPool(GEOMETRY, 5))  # of a GPU, this time on a CPU
    assert memory is None or len(memory) == 5 * GEOMETRY.page_bytes
    assert "NIXL is not used" in caplog.text
    assert "install headrace[nixl]" in caplog.text
    assert (kv_memory.backends, kv_memory.nixl, kv_memory.pool_memory) == ((ZMQ,), "", None)
    assert NIXL not in {*kv_memory.transports, *kv_memory.registered_pools}


def test_a_pool_that_does_not_fit_is_private_and_the_log_says_so(
    kv_memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert kv_memory.allocate(GEOMETRY, 1 << 40) is None
    assert kv_memory.backends == (ZMQ,)
    assert "cannot be in shared memory" in caplog.text
    assert KVPool(GEOMETRY, 5, "cpu", lambda *_: None).tensor.shape == (5, 3, 2, 2, 8, 4)
