"""PageRunAllocator against a list of booleans; the staging area as a page store."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.kv.geometry import Geometry
from headrace.peer.staging import PAGE_TOKENS, PageRunAllocator, Staging
from headrace.transfer.protocol.layout import Box


@given(st.integers(0, 12), st.lists(st.integers(-6, 6), max_size=40))
def test_runs_are_the_first_that_fit_and_all_come_back(pages: int, steps: list[int]) -> None:
    runs, taken = PageRunAllocator(pages), [False] * pages
    held: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            fits = [at for at in range(pages - step + 1) if not any(taken[at : at + step])]
            first = runs.allocate(step)
            assert first == (fits[0] if fits else None)
            if first is not None:
                held.append((first, step))
                taken[first : first + step] = [True] * step
        elif held:
            first, count = held.pop(step % len(held))
            runs.free(first, count)
            taken[first : first + count] = [False] * count
        assert runs.free_pages == taken.count(False)
    for first, count in held:
        runs.free(first, count)
    assert runs.allocate(pages) == (0 if pages else None)


def test_a_run_of_pages_is_one_slice_of_every_head() -> None:
    staging = Staging(Geometry("float16", 3, 2, 4, page_size=1), tokens=3 * PAGE_TOKENS - 5)
    assert (staging.pages, staging.geometry.page_size) == (3, PAGE_TOKENS)
    random = np.random.default_rng(1)
    whole = random.integers(0, 255, (3, 2, 2, 3 * PAGE_TOKENS, 8), np.uint8)
    for page in range(3):
        for heads in (slice(0, 1), slice(1, 2)):
            for layers in (slice(0, 2), slice(2, 3)):
                for slot, count in ((0, 10), (10, PAGE_TOKENS - 10)):
                    at = page * PAGE_TOKENS + slot
                    part = whole[layers, :, heads, at : at + count]
                    staging.write(page, slot, count, part, Box(layers, heads))
                    assert np.array_equal(staging.read(page, slot, count, Box(layers, heads)), part)
    assert np.array_equal(staging.data, whole)
