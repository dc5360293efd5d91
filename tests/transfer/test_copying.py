"""Copies of pages by the compiled road and by numpy."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.backends import copying

SIZES = st.one_of(st.integers(0, 300), st.integers(copying.STREAMED_BYTES - 70, copying.STREAMED_BYTES + 300))


@pytest.fixture(params=["built", "plain"], scope="module")
def copy(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    if request.param == "built" and copying._stream() is None:
        pytest.skip("no compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(copying, "_stream", lambda: None)
        yield copying.copy


@given(size=SIZES, start=st.integers(0, 70), other=st.integers(0, 70), seed=st.integers(0, 9))
def test_just_these_bytes_are_copied(copy: Callable[..., None], size: int, start: int, other: int, seed: int) -> None:
    """From any address to any address, and nothing around them."""
    source = np.random.default_rng(seed).integers(0, 256, size + 200, np.uint8)
    target = np.full(size + 200, 7, np.uint8)
    copy(target[start : start + size], source[other : other + size])
    assert (target[start : start + size] == source[other : other + size]).all()
    assert (target[:start] == 7).all()
    assert (target[start + size :] == 7).all()


def test_strided_pages_are_copied_too(copy: Callable[..., None]) -> None:
    source = np.random.default_rng(0).integers(0, 256, (4, 2, 3, 32, 128), np.uint8)
    target = np.zeros_like(source)
    copy(target[:, :, 1:, 4:20], source[:, :, 1:, 4:20])
    expected = np.zeros_like(source)
    expected[:, :, 1:, 4:20] = source[:, :, 1:, 4:20]
    assert (target == expected).all()
    with pytest.raises(ValueError, match="could not broadcast"):
        copy(target, source[:3])
