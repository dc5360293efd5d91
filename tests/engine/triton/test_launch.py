"""Compiled kernels that are kept: each launch is of the one that Triton would take, with a driver that runs nothing."""

from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from headrace.engine.triton import kernels, launch

Ran = tuple[Any, ...]


class Driver:
    """Triton's driver of a GPU that is not there. Also what loads kernels, and what launches one."""

    ran: list[Ran]

    def __init__(self) -> None:
        self.ran = []
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *_: object) -> tuple[object, ...]:
        return 1, object(), 32, 0, 1024  # the second stands for what was loaded

    def launcher_cls(self, *_: object) -> Any:
        return lambda x, y, z, stream, loaded, *given: self.ran.append((x, y, z, loaded, *given[4:]))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """Launches: grid, what was loaded, arguments."""
    fake = Driver()
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(driver, "_active", fake)
    return fake.ran


class Norm(NamedTuple):
    """Arguments of the kernel add_norm."""

    dtype: torch.dtype = torch.bfloat16
    width: int = 64
    step: int = 64
    aligned: bool = True
    adds: bool = True
    warps: int = 4

    def arguments(self) -> tuple[object, ...]:
        rows: list[Tensor] = [torch.zeros(4, 128, dtype=self.dtype) for _ in range(4)]
        first = rows[0] if self.aligned else rows[0].flatten()[1:]
        return first, rows[1], rows[2], rows[3], self.width, 1e-5, self.step

    def constants(self) -> dict[str, object]:
        return {"num_warps": self.warps, "BLOCK": 64, "ADDS": self.adds}


CASES = [
    Norm(), Norm(dtype=torch.float32), Norm(width=63), Norm(step=1), Norm(step=8), Norm(step=1 << 31),
    Norm(aligned=False), Norm(adds=False), Norm(warps=2), Norm(width=48),
]  # fmt: skip


def test_each_launch_is_of_the_kernel_that_triton_takes(ran: list[Ran]) -> None:
    """Whether it was launched before or not."""
    fresh: Any = triton.jit(kernels.add_norm.fn)
    for case in (*CASES, *CASES):
        given, grid = case.arguments(), (4,)
        launch.launch(fresh, grid, *given, **case.constants())
        fresh[grid](*given, **case.constants())
        ours, theirs = ran[-2:]
        assert ours[:4] == theirs[:4], "grid, and what was loaded"
        assert [id(each) if isinstance(each, Tensor) else each for each in ours[4:]] == [
            id(each) if isinstance(each, Tensor) else each for each in theirs[4:]
        ]
    assert len(launch._compiled) == len(CASES) - 1, "the last is like the first"
    assert len({each[3] for each in ran}) == len(CASES) - 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1000, 1024, 1025])
def test_powers_of_two(count: int) -> None:
    assert launch.power_of_2(count) == triton.next_power_of_2(count)
