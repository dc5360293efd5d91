"""Copies of pages by the compiled road and by numpy."""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.transfer.backends import copying

SIZES = st.one_of(st.integers(0, 300), st.integers(copying.STREAMED_BYTES - 70, copying.STREAMED_BYTES + 300))


@pytest.fixture(params=["built", "plain"], scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    if request.param == "built" and copying._library() is None:
        pytest.skip("no compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(copying, "_library", lambda: None)
        yield copying


@given(size=SIZES, start=st.integers(0, 70), other=st.integers(0, 70), seed=st.integers(0, 9))
def test_just_these_bytes_are_copied(way: ModuleType, size: int, start: int, other: int, seed: int) -> None:
    """From any address to any address, and nothing around them."""
    source = np.random.default_rng(seed).integers(0, 256, size + 200, np.uint8)
    target = np.full(size + 200, 7, np.uint8)
    way.copy(target[start : start + size], source[other : other + size])
    assert (target[start : start + size] == source[other : other + size]).all()
    assert (target[:start] == 7).all()
    assert (target[start + size :] == 7).all()


def test_strided_pages_are_copied_too(way: ModuleType) -> None:
    source = np.random.default_rng(0).integers(0, 256, (4, 2, 3, 32, 128), np.uint8)
    target = np.zeros_like(source)
    way.copy(target[:, :, 1:, 4:20], source[:, :, 1:, 4:20])
    expected = np.zeros_like(source)
    expected[:, :, 1:, 4:20] = source[:, :, 1:, 4:20]
    assert (target == expected).all()
    with pytest.raises(ValueError, match="could not broadcast"):
        way.copy(target, source[:3])


@pytest.mark.parametrize("size", [16, copying.STREAMED_BYTES + 48])
def test_rows_go_where_they_are_to_go(way: ModuleType, size: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (9, size), np.uint8)
    target = np.full((7, size), 7, np.uint8)
    way.copy_rows(target, [6, 0, 3], source, [8, 2, 2])
    expected = np.full((7, size), 7, np.uint8)
    expected[[6, 0, 3]] = source[[8, 2, 2]]
    assert (target == expected).all()
    way.copy_rows(target, [], source, [])
    assert (target == expected).all()


def test_rows_that_a_table_has_not_are_refused(way: ModuleType) -> None:
    source, target = np.zeros((4, copying.STREAMED_BYTES), np.uint8), np.ones((5, copying.STREAMED_BYTES), np.uint8)
    for rows, own in (([5], [0]), ([-1], [0]), ([0], [4]), ([0], [-1])):
        with pytest.raises(IndexError):
            way.copy_rows(target, rows, source, own)
    with pytest.raises(ValueError, match="1 rows"):
        way.copy_rows(target, [0, 1], source, [0])
    with pytest.raises(ValueError, match="rows of"):
        way.copy_rows(target, [0], source[:, 1:], [0])
    assert (target == 1).all()
