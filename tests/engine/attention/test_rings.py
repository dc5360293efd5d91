"""Attention over rings of requests' last keys and values, against all of them side by side; other slots have NaN."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.types.kv.geometry import Component, Geometry, ring_positions
from headrace.engine.attention.native import NativeWork
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.attention.rings import RingPass
from headrace.engine.attention.slots import LayerSlot, Scores, plain_attention
from headrace.engine.attention.work import Ranges
from headrace.engine.kv.pool import KVPool
from headrace.engine.native.kernel_calls import Kernels, load_kernels
from tests.engine.kernels import assert_same_bits, normal

HEADS, KV_HEADS, LAYERS = 6, 2, 3
NO_PAGES = np.zeros(0, dtype=np.int64)


class Request(NamedTuple):
    """All of one's keys, values and queries, [tokens, heads, width]."""

    slot: int
    keys: Tensor
    values: Tensor
    query: Tensor


def make_pool(window: int, width: int, value_width: int) -> KVPool:
    parts = [
        Component("k", "float32", LAYERS, KV_HEADS, width, 1, per_request=True, window=window),
        Component("v", "float32", LAYERS, KV_HEADS, value_width, 1, per_request=True, window=window),
    ]
    if width == value_width:
        parts = [Component("k", "float32", LAYERS, KV_HEADS, width, 2, per_request=True, window=window)]
    pool = KVPool(Geometry("float32", 0, 0, 0, 16, components=tuple(parts)), 1)
    for tensor in pool.tensors.values():
        tensor.fill_(float("nan"))
    return pool


def make_request(slot: int, length: int, width: int, value_width: int) -> Request:
    sizes = (KV_HEADS, width), (KV_HEADS, value_width), (HEADS, width)
    return Request(slot, *(normal(length, *size, seed=100 * slot + at) for at, size in enumerate(sizes)))


def window_ranges(spans: list[AttentionSpan], window: int) -> Ranges:
    positions = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans]).astype(np.int32)
    return Ranges(np.maximum(positions - window + 1, 0).astype(np.int32), positions + 1)


def computed(
    pool: KVPool, kernels: Kernels | None, rows: list[tuple[Request, int, int]], window: int, scores: Scores, layer: int
) -> Tensor:
    """A pass over tokens [start, end) of requests."""
    spans = [AttentionSpan(start, end - start, NO_PAGES, slot=request.slot) for request, start, end in rows]
    keys, values, query = (
        torch.cat([getattr(request, name)[start:end] for request, start, end in rows])
        for name in ("keys", "values", "query")
    )
    slot = LayerSlot("k", "v" if "v" in pool.tensors else "k", layer)
    ranges = window_ranges(spans, window)
    return RingPass(pool, None if kernels is None else partial(NativeWork, kernels), spans).attend(
        slot, query, keys, values, scores, ranges, window
    )


def expected(request: Request, window: int, scores: Scores) -> Tensor:
    positions = torch.arange(len(request.keys))
    seen = (positions <= positions[:, None]) & (positions > positions[:, None] - window)
    return plain_attention(request.query, request.keys, request.values, seen, scores)


@pytest.mark.parametrize("by", ["kernels", "torch"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_chunks_give_what_all_positions_give(by: str, data: st.DataObject) -> None:
    kernels: Kernels | None = load_kernels(wide=False, bfloat16=True) if by == "kernels" else None
    if by == "kernels" and kernels is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    window = data.draw(st.integers(1, 200))
    width, value_width = data.draw(st.sampled_from([(16, 16), (32, 16)]))
    pool, layer = make_pool(window, width, value_width), data.draw(st.integers(0, LAYERS - 1))
    sinks = normal(HEADS, seed=5) if data.draw(st.booleans()) else None
    scores = Scores(0.3, data.draw(st.sampled_from([0.0, 2.0])), sinks)
    requests = [make_request(slot, data.draw(st.integers(1, 400)), width, value_width) for slot in (5, 2)]
    done, found = [0, 0], [[], []]  # type: ignore[var-annotated]
    while any(at < len(request.keys) for at, request in zip(done, requests, strict=True)):
        rows: list[tuple[Request, int, int]] = []
        for at, request in zip(done, requests, strict=True):
            if left := len(request.keys) - at:
                rows.append((request, at, at + data.draw(st.integers(1, min(left, 180)))))
        parts = computed(pool, kernels, rows, window, scores, layer).split([end - start for _, start, end in rows])
        for (request, _, end), part in zip(rows, parts, strict=True):
            number = requests.index(request)
            found[number].append(part)
            done[number] = end
    for parts_of, request in zip(found, requests, strict=True):
        torch.testing.assert_close(torch.cat(parts_of), expected(request, window, scores), atol=2e-5, rtol=2e-5)
    used = {request.slot for request in requests}
    for tensor in pool.tensors.values():
        others = tensor[[slot for slot in range(len(tensor)) if slot not in used]]
        assert others.isnan().all()


def test_neither_chunks_nor_neighbours_change_a_bit() -> None:
    kernels = load_kernels(wide=False, bfloat16=True)
    if kernels is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    window, scores = 100, Scores(0.25)
    request, other = make_request(1, 500, 32, 32), make_request(3, 90, 32, 32)
    whole = computed(make_pool(window, 32, 32), kernels, [(request, 0, 500)], window, scores, 0)
    for size in (1, 7, 64, 65, 130, 333):
        pool, parts = make_pool(window, 32, 32), []
        for start in range(0, 500, size):
            end = min(start + size, 500)
            beside = [(other, 0, 90)] if start % 2 else []
            rows = [*beside, (request, start, end)]
            parts.append(computed(pool, kernels, rows, window, scores, 0)[-(end - start) :])
        assert_same_bits(torch.cat(parts), whole)


def test_rings_go_on_behind_checkpoints_which_stay_as_they_are() -> None:
    window, scores = 40, Scores(0.25)
    request = make_request(1, 300, 16, 16)
    pool = make_pool(window, 16, 16)
    computed(pool, None, [(request, 0, 150)], window, scores, 0)
    RingPass(pool, None, [AttentionSpan(0, 150, NO_PAGES, slot=1, checkpoint=6)]).keep_checkpoints(["k"])
    kept = pool.tensors["k"][6].clone()
    computed(pool, None, [(request, 150, 300)], window, scores, 0)
    RingPass(pool, None, [AttentionSpan(150, 150, NO_PAGES, slot=4, resume=6)]).resume(["k"])
    again = computed(pool, None, [(request._replace(slot=4), 150, 300)], window, scores, 0)
    torch.testing.assert_close(again, expected(request, window, scores)[150:], atol=2e-5, rtol=2e-5)
    assert_same_bits(pool.tensors["k"][6], kept)


@pytest.mark.parametrize(("slot", "seen", "error"), [(-1, 40, IndexError), (99, 40, IndexError), (1, 41, ValueError)])
def test_what_no_ring_has_is_refused(slot: int, seen: int, error: Any) -> None:
    request = make_request(1, 100, 16, 16)
    pool = make_pool(40, 16, 16)
    spans = [AttentionSpan(0, 100, NO_PAGES, slot=slot)]
    with pytest.raises(error):
        RingPass(pool, None, spans).attend(
            LayerSlot("k", "k", 0), request.query, request.keys, request.values, Scores(1.0),
            window_ranges(spans, seen), 40,
        )  # fmt: skip
    assert pool.tensors["k"].isnan().all()


@pytest.mark.parametrize(("window", "places"), [(1, 128), (64, 128), (65, 192), (512, 576), (1024, 1088)])
def test_a_ring_has_a_step_more_than_its_window(window: int, places: int) -> None:
    assert ring_positions(window) == places
