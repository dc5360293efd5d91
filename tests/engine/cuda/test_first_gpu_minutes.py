"""The script that is to be run first on a GPU runs to its end on a CPU, and survives parts that fail."""

from unittest.mock import patch

import pytest
import torch

from benchmarks import first_gpu_kernels, first_gpu_minutes
from benchmarks.first_gpu_minutes import Minutes
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.triton.ahead import recorded

ON_CPU = ["--device", "cpu", "--tiny", "--threads", "1"]


def in_short(printed: str) -> list[str]:
    """The lines of the summary."""
    return printed.partition("in short")[2].splitlines()[1:]


@pytest.mark.full
def test_every_part_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_gpu_minutes.main(ON_CPU) == 0
    found = in_short(capsys.readouterr().out)
    assert "Llama, tiny, 2 layers, handed over after 40 tokens: 8 of 8 tokens as alone" in found
    for name in ("prefill and decode", "two stages and decode"):
        assert any(line.startswith(f"{name}: the text of one server, first token after") for line in found)
    assert "CUDA graphs: needs CUDA" in found
    for name in first_gpu_minutes.TINY_SHAPES:
        [gap] = [line.split()[-1] for line in found if line.startswith(f"{name}: bfloat16 differs")]
        assert float(gap) < 0.02
    assert len(found) <= 100


def test_a_part_that_fails_costs_the_others_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Minutes) -> None:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    def last(at: Minutes) -> None:
        at.keep("the last part")

    with patch.object(first_gpu_minutes, "PARTS", (broken, last)):
        assert first_gpu_minutes.main(ON_CPU) == 1
        found = in_short(capsys.readouterr().out)
        assert found[0].startswith("broken: failed at test_first_gpu_minutes.py:")
        assert found[0].endswith(": RuntimeError: no kernel image is available")
        assert found[1] == "the last part"
        assert first_gpu_minutes.main([*ON_CPU, "--seconds", "-1"]) == 0
        assert in_short(capsys.readouterr().out) == ["broken: no time is left", "last: no time is left"]


def test_products_are_timed_beside_torchs_for_each_shape(gpu: FakeGpu) -> None:
    """By kernels that are not run, on a GPU that is not there."""
    at = Minutes(torch.device("cuda:0"), tiny=False, until=0.0)
    with gpu, recorded() as launches, patch.object(first_gpu_kernels, "gap_of", lambda *_: 0.0):
        first_gpu_kernels.products(at)
    assert len(at.kept) == 4 * 5
    assert at.kept[0] == "product 4096 x 4096 added of 8,192 rows 1.000 ms, torch's 1.000; differs by 0.0e+00"
    assert {"added", "heads", "gated"} == {each.constants["FORM"] for each in launches if "FORM" in each.constants}
