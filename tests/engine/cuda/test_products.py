"""The products of passes at the widths of large models: which are our own.

The arithmetic is that for GPUs; its kernels are not run."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from headrace.core.messages.orders import PlanRow
from headrace.engine.runner import ModelRunner
from headrace.engine.triton.arithmetic import TritonArithmetic
from headrace.engine.triton.products import LEAST_ROWS, OwnProducts
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.cuda.models import fake_runner, incoming, row
from tests.engine.triton.ahead import Launch, recorded

MANY, FEW = [row(1, 0, 2048)], [row(request, 800, 1, first_page=request * 60) for request in range(1, 9)]
LEAST, FEWER = [row(1, 0, LEAST_ROWS)], [row(1, 0, LEAST_ROWS - 1)]
DENSE = {"heads": 2, "added": 4, "gated": 2}
"""Of two layers."""


@contextmanager
def started(
    gpu: FakeGpu, folder: Path, name: str, *, dense: bool, float8: bool = False
) -> Iterator[tuple[ModelRunner, list[Launch]]]:
    """A runner of two layers, and the launches of its kernels. dense: as with --compile products."""
    with (
        recorded() as launches,
        patch("tests.engine.cuda.models._Fused", lambda *_: TritonArithmetic(OwnProducts(dense=dense))),
        fake_runner(gpu, folder, name, float8=float8) as made,
    ):
        yield made, launches


def launched(made: ModelRunner, launches: list[Launch], rows: list[PlanRow]) -> Counter[str]:
    """Our own products of a pass, by what is done with them; those that only multiply are left out."""
    launches.clear()
    made.forward(rows, incoming(made, rows))
    return Counter(str(form) for each in launches if (form := each.constants.get("FORM", "plain")) != "plain")


def test_products_of_a_dense_model(gpu: FakeGpu, tmp_path: Path) -> None:
    with started(gpu, tmp_path, "llama-3.1-8b", dense=False) as (made, launches):
        assert not launched(made, launches, MANY)
    with started(gpu, tmp_path, "llama-3.1-8b", dense=True) as (made, launches):
        assert launched(made, launches, MANY) == DENSE
        assert sum("add_norm" in each.kernel.__name__ for each in launches) == 1, "only the first"
        assert launched(made, launches, LEAST) == DENSE
        assert not launched(made, launches, FEWER)
        assert not launched(made, launches, FEW)


@pytest.mark.parametrize(("dense", "expected"), [(True, DENSE | {"added": 2}), (False, {"gated": 2})])
def test_products_of_experts(gpu: FakeGpu, tmp_path: Path, dense: bool, expected: dict[str, int]) -> None:
    with started(gpu, tmp_path, "qwen3-30b-a3b", dense=dense) as (made, launches):
        assert launched(made, launches, MANY) == expected
        assert "take_rows" not in {each.kernel.__name__ for each in launches}
        assert not launched(made, launches, FEW)
        assert "take_rows" in {each.kernel.__name__ for each in launches}


def test_products_of_shards(gpu: FakeGpu, tmp_path: Path) -> None:
    with started(gpu, tmp_path, "llama-3.3-70b-tp4", dense=True) as (made, launches):
        assert launched(made, launches, MANY) == {"heads": 2, "gated": 2}, "what is summed is added behind the sum"
    with started(gpu, tmp_path, "deepseek-v3-tp8", dense=False) as (made, launches):
        assert launched(made, launches, MANY) == {"gated": 2}


@pytest.mark.parametrize(("dense", "expected"), [(True, DENSE | {"added": 2}), (False, {})])
def test_products_in_float8(gpu: FakeGpu, tmp_path: Path, dense: bool, expected: dict[str, int]) -> None:
    """Of which none has been measured."""
    with started(gpu, tmp_path, "qwen3-30b-a3b", dense=dense, float8=True) as (made, launches):
        assert launched(made, launches, MANY) == expected
