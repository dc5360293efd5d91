"""States of requests in the handoff: they come with the last chunk, into the slot of the reservation and no other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.messages.stage_events import ChunkAcked, ReceiveFailed
from headrace.core.types.kv.backends import SHM, ZMQ
from headrace.core.types.kv.geometry import KV, LEAST_SLOTS, RING_STEP, Component, Geometry, ring_positions
from headrace.transfer.backends.writer_locks import host_token
from headrace.transfer.protocol.layout import STATE, carried, copies
from tests.transfer.group import DST_SLOT, PAGES, SLOT, Group
from tests.transfer.ranks import grid

CONV = Component("conv0:6x3", "float32", layers=3, kv_heads=1, head_dim=18, planes=1, per_request=True)
RECURRENT = Component("recurrent0:2x4x4", "float32", layers=3, kv_heads=1, head_dim=32, planes=1, per_request=True)
RING = Component("w24:2x6", "float16", layers=3, kv_heads=2, head_dim=6, per_request=True, window=24)


def states(first: int, layers: int) -> tuple[Component, ...]:
    return tuple(replace(each, layer_start=first, layers=layers) for each in (CONV, RECURRENT, RING))


def one_rank(size: int) -> list[Geometry]:
    return [replace(rank, components=states(0, 3)) for rank in grid(size, [4], [4])]


def two_stages(size: int) -> list[Geometry]:
    """Layers with states are divided otherwise than those with keys and values."""
    parts = states(0, 1), states(1, 2)
    return [replace(rank, components=each) for rank, each in zip(grid(size, [3, 1], [4]), parts, strict=True)]


def states_apart(size: int) -> list[Geometry]:
    """A stage of layers that keep states alone, and one of layers without."""
    bare = Geometry("float16", layers=0, kv_heads=0, head_dim=4, page_size=size, components=states(0, 3))
    return [*grid(size, [4], [4]), bare]


SIDES = [one_rank, two_stages, states_apart]


@pytest.mark.parametrize("backend", [ZMQ, pytest.param(SHM, marks=pytest.mark.skipif(not host_token(), reason="shm"))])
@pytest.mark.parametrize("source", SIDES)
@pytest.mark.parametrize("destination", SIDES)
def test_states_come_with_the_last_chunk_and_no_byte_more(
    context: Any, backend: str, source: Any, destination: Any
) -> None:
    start, end = 7, 60
    sources, destinations = source(16), destination(8)
    group = Group(context, sources, destinations, backend=backend)
    untouched = [{name: data.copy() for name, data in store.tensors.items()} for store in group.targets]
    for receiver in group.receivers:
        group.connect(receiver)
    group.hand_over(start, end, [start, 16, end], range(40, 44), range(30, 38))
    moved = sum(event.bytes for sender in group.senders for event in group.loop.of(sender, ChunkAcked))
    assert moved == sum((end - start) * rank.token_bytes + rank.states_sent(end) for rank in destinations)
    for name, places in ((CONV.name, slice(None)), (RECURRENT.name, slice(None)), (RING.name, slice(end - 24, end))):
        sent, found = (
            {
                part.layer_start + layer: store.tensors[name][slot, layer, :, :, places].tobytes()
                for rank, store in zip(ranks, stores, strict=True)
                for part in rank.components
                if part.name == name
                for layer in range(part.layers)
            }
            for ranks, stores, slot in ((sources, group.stores, SLOT), (destinations, group.targets, DST_SLOT))
        )
        assert found == sent
        assert len(found) == 3
    for store, before in zip(group.targets, untouched, strict=True):
        for name, data in store.tensors.items():
            if name != KV:
                others = [slot for slot in range(LEAST_SLOTS) if slot != DST_SLOT]
                assert np.array_equal(data[others], before[name][others])
            if name == RING.name:
                behind = slice(end, None)
                assert np.array_equal(data[..., behind, :], before[name][..., behind, :])
    group.close()


def test_a_slot_that_was_not_reserved_fails_the_request(context: Any) -> None:
    group = Group(context, one_rank(16), one_rank(16))
    [receiver], [sender] = group.receivers, group.senders
    group.connect(receiver)
    group.expect(range(2), 0, 20)
    group._slot = lambda ranks, slot: slot + 1  # type: ignore[method-assign]
    group.send(sender, 0, 0, 20, last=True, pages=range(2), dst=range(2))
    failed = group.loop.wait_for(receiver, ReceiveFailed)
    assert failed.code == "bad_chunk"
    assert f"slot {DST_SLOT + 1}, reserved was {DST_SLOT}" in failed.message
    group.close()


def test_pages_move_without_states_before_the_last_chunk() -> None:
    [rank] = one_rank(16)
    assert all(copy.page != STATE for copy in copies(rank, rank, 0, 40))
    assert [copy.part.name for copy in copies(rank, rank, 0, 0, True)] == [
        CONV.name,
        RECURRENT.name,
    ]  # of no token, a window has nothing


def test_a_pool_has_slots_beside_its_pages() -> None:
    [rank] = one_rank(16)
    assert rank.slots_for(PAGES) == LEAST_SLOTS
    assert rank.slots_for(16 * 1024) == 16 * 1024 * 16 // 1024
    for room in (0, rank.state_bytes, 10**6, 10**7 + 12345):
        pages = rank.pages_within(room)
        assert not pages or rank.pool_bytes(pages) <= room
        assert rank.pool_bytes(pages + 1) > room


@given(window=st.integers(1, 200), end=st.integers(0, 900), chunk=st.integers(0, 300))
def test_the_last_positions_of_a_ring_are_sent_and_no_others(window: int, end: int, chunk: int) -> None:
    ring = replace(RING, window=window)
    rank = Geometry("float16", layers=0, kv_heads=0, head_dim=2, page_size=16, components=(ring,))
    size = ring_positions(window)
    assert window + RING_STEP <= size
    source = {position % size: position for position in range(end)}
    start = max(0, end - chunk)
    plan = copies(rank, rank, start, end - start, True)
    found = {copy.slot + at: source[copy.source_slot + at] for copy in plan for at in range(copy.count)}
    assert found == {position % size: position for position in range(max(0, end - window), end)}
    frames = [frame for frame, _ in carried(plan)]
    assert sum(frame.bytes for frame in frames) == rank.states_sent(end)
    assert len(frames) <= 2


def test_a_window_takes_less_than_pages_would() -> None:
    for window in (1, 64, 512, 1024, 4096):
        rank = Geometry("float16", 0, 0, 2, page_size=16, components=(replace(RING, window=window),))
        pages = 16 * 1024
        assert rank.slots_for(pages) >= LEAST_SLOTS
        assert rank.slots_for(pages) * rank.state_bytes <= pages * 16 * RING.token_bytes / 4
