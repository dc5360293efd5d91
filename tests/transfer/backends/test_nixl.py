"""KV through NIXL between processes: the right bytes, whatever the geometry, and frames where NIXL cannot be used."""

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.core.messages.orders import CloseSession
from headrace.core.messages.stage_events import KvReceived, SendFailed
from headrace.core.types.kv.backends import NIXL, NixlAccess
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.transfer.protocol.layout import pages_for
from tests.transfer.harness import gather, value
from tests.transfer.nixl_handoff import BIG, CONFIG, PAGES, Handoff

pytestmark = pytest.mark.nixl

LATENT = Geometry(
    "float32", 0, 0, 0, 16, components=(Component("latent", "float32", layers=3, kv_heads=1, head_dim=72, planes=1),)
)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_right_for_random_geometries(make_handoff: Any, seed: int) -> None:
    """Other page sizes, and other layers and heads of which a part is shared; with components and without."""
    draw = random.Random(seed)
    latent = Component("latent", "float32", layers=2, kv_heads=1, head_dim=3, planes=1)
    components = (latent, Component("draft", "float16", layers=1, kv_heads=2, head_dim=5)) if seed % 2 else ()
    layers, heads = draw.randint(1, 5), draw.randint(1, 4)
    first, head = draw.randrange(layers), draw.randrange(heads)
    source = Geometry("float16", layers, heads, draw.randint(1, 9), draw.randint(1, 40), components=components)
    destination = Geometry(
        "float16",
        draw.randint(1, layers - first),
        draw.randint(1, heads - head),
        source.head_dim,
        draw.randint(1, 40),
        first,
        head,
        components[::-1],
    )
    handoff = make_handoff(source, destination, 64)
    handoff.join("s" * 32)
    for request in range(1, 6):
        start, count = draw.randint(0, 30), draw.randint(1, 60)
        pages = draw.sample(range(64), pages_for(source.page_size, start, count))
        dst_pages = draw.sample(range(64), pages_for(destination.page_size, start, count))
        before = {name: data.copy() for name, data in handoff.target.tensors.items()}
        handoff.fetch(request, "s" * 32, pages, dst_pages, start, count)
        handoff.loop.wait_for(handoff.receiver, KvReceived, request, 20.0)
        wanted = gather(handoff.store, source, pages, start, count)
        wanted = wanted[:, first : first + destination.layers, :, head : head + destination.kv_heads]
        assert np.array_equal(gather(handoff.target, destination, dst_pages, start, count), wanted)
        for part in components:
            wanted = gather(handoff.store, source, pages, start, count, part.name)
            assert np.array_equal(gather(handoff.target, destination, dst_pages, start, count, part.name), wanted)
        others = sorted(set(range(64)) - set(dst_pages))
        for name, data in handoff.target.tensors.items():
            assert np.array_equal(data[others], before[name][others])
    statistics = handoff.receiver.statistics()
    assert value(statistics, "bytes_received_total", ("nixl",)) > 0
    assert value(statistics, "bytes_received_total", ("zmq",)) == 0


@pytest.mark.parametrize("geometry", [BIG, LATENT], ids=["keys and values", "latent"])
def test_whole_pages_go_in_any_order_where_nothing_is_checked(make_handoff: Any, geometry: Geometry) -> None:
    """Without checksums pages are not looked at one by one."""
    [name] = [tensor.name for tensor in geometry.tensors]
    handoff = make_handoff(geometry, geometry, 64, msgspec.structs.replace(CONFIG, checksum=False))
    handoff.join("s" * 32)
    pages, dst_pages = random.Random(1).sample(range(64), 9), random.Random(2).sample(range(64), 9)
    before = handoff.target.tensors[name].copy()
    start, count = 5, 8 * geometry.page_size  # the first and the last page in part
    handoff.fetch(1, "s" * 32, pages, dst_pages, start, count)
    handoff.loop.wait_for(handoff.receiver, KvReceived, 1, 20.0)
    wanted = gather(handoff.store, geometry, pages, start, count, name)
    assert np.array_equal(gather(handoff.target, geometry, dst_pages, start, count, name), wanted)
    others = sorted(set(range(64)) - set(dst_pages))
    assert np.array_equal(handoff.target.tensors[name][others], before[others])
    handoff.send(2, "s" * 32, [0], [64], 0, geometry.page_size)
    failed = handoff.stage.wait_for(SendFailed)
    assert (failed.code, failed.message) == ("bad_chunk", "page 64 of 64 pages")


def test_sessions_have_rights_of_their_own(big: Handoff) -> None:
    big.join("t" * 32)
    big.loop.until(lambda: value(big.receiver.statistics(), "data_connections") == 2, 20.0)
    big.loop.apply(big.receiver, CloseSession(seq=0, session="s" * 32))
    big.fetch(1, "t" * 32, range(4), range(4), 0, 4 * BIG.page_size)
    big.loop.wait_for(big.receiver, KvReceived, 1, 20.0)
    assert np.array_equal(big.target.data[:4], big.store.data[:4])


def test_pages_that_the_peer_has_not_fail_the_request(big: Handoff) -> None:
    big.loop.until(lambda: value(big.receiver.statistics(), "data_connections") == 1, 20.0)
    big.send(1, "s" * 32, [0], [PAGES], 0, BIG.page_size)
    failed = big.stage.wait_for(SendFailed)
    assert (failed.code, failed.message) == ("bad_chunk", f"slots 0 to 32 of page {PAGES}: {PAGES} pages of 32")


@pytest.mark.parametrize("metadata", [b"x", b"nixlSerDes|Agent", bytes(300)])
def test_kv_comes_in_frames_where_the_agent_cannot_be_reached(big: Handoff, metadata: bytes) -> None:
    big.registered = SimpleNamespace(  # type: ignore[assignment]
        memory=big.registered.memory,
        grant=lambda session: NixlAccess(metadata=metadata, address=0),
        revoke=big.registered.revoke,
        close=big.registered.close,
    )
    big.receiver._registered_pools[NIXL] = big.registered
    big.join("t" * 32)
    big.fetch(1, "t" * 32, range(4), range(4), 0, 4 * BIG.page_size)
    big.loop.wait_for(big.receiver, KvReceived, 1, 20.0)
    assert np.array_equal(big.target.data[:4], big.store.data[:4])
    assert value(big.receiver.statistics(), "bytes_received_total", ("zmq",)) == 4 * BIG.page_bytes
