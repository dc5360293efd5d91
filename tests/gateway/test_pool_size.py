"""The pool of a gateway, of either kind: its pages, and memory that there is not."""

import errno
import os
from typing import NoReturn

import pytest

from headrace.core.config import GatewayConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.pool_size import with_pool

GEOMETRY = Geometry("float32", 2, 1, 8, 16)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 25), (1, 1), (16, 1), (17, 2)])
def test_pages(tokens: int, pages: int) -> None:
    assert with_pool(GatewayConfig(pool_tokens=tokens), GEOMETRY, 100, lambda found: found) == pages


def test_more_than_there_is_is_not_asked_for() -> None:
    asked: list[int] = []
    with pytest.raises(ConfigError, match=r"no memory for a pool of 1000000000000 tokens \(\d+ MiB\): \d+ MiB are av"):
        with_pool(GatewayConfig(pool_tokens=10**12), GEOMETRY, 100, asked.append)
    assert asked == []


def test_a_gpu_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.pool_size.available_memory", {"cuda:1": 5 << 20}.__getitem__)
    with pytest.raises(
        ConfigError,
        match=r"^no memory for a pool of 102400 tokens \(12 MiB of cuda:1\): 5 MiB are available; write a smaller "
        r"--pool-tokens, or --device cpu$",
    ):
        with_pool(GatewayConfig(pool_tokens=102_400), GEOMETRY, 100, lambda pages: pages, "cuda:1")


def test_memory_that_is_refused() -> None:
    def make(pages: int) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with pytest.raises(ConfigError, match=r"no memory for a pool of 400 tokens .* write a smaller --pool-tokens"):
        with_pool(GatewayConfig(), GEOMETRY, 100, make)
