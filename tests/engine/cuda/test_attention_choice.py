"""Which attention a start on a GPU chooses where FlashInfer is not installed, by a clock that is set."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headrace.core.config import AttentionChoice
from headrace.core.types.errors import ConfigError
from headrace.engine import attention
from headrace.engine.attention import triton_work
from tests.engine.cuda.fake_gpu import Event, FakeGpu
from tests.engine.cuda.models import fake_runner

OURS, FLASH = "our Triton kernel over pages", "torch's flash kernel behind a gather"
NONE = "FlashInfer: it is not installed: pip install 'headrace[flashinfer]'"
NOT_WANTED = "FlashInfer: it is not wanted"


@contextmanager
def rounds(monkeypatch: pytest.MonkeyPatch, ours: list[float], flash: list[float]) -> Iterator[None]:
    """Milliseconds of each one's rounds."""
    times = [*ours, *flash]
    with monkeypatch.context() as patched:
        patched.setattr(Event, "elapsed_time", lambda *_: times.pop(0))
        yield
    assert not times, "each one's rounds were timed"


def chosen(gpu: FakeGpu, folder: Path, wanted: AttentionChoice = "auto") -> str:
    with fake_runner(gpu, folder, "llama-3.1-8b", 1, attention=wanted) as made:
        return made._decoder.attention


def test_the_faster_one_is_chosen(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rounds(monkeypatch, [5.0, 0.4, 3.0], [9.0, 8.0, 0.61]):
        assert chosen(gpu, tmp_path) == f"{OURS} (0.40 ms in a trial, {FLASH} 0.61; {NONE})"
    with rounds(monkeypatch, [0.7, 0.8, 0.9], [0.8, 0.61, 0.7]):
        assert chosen(gpu, tmp_path) == f"{FLASH} (0.61 ms in a trial, {OURS} 0.70; {NONE})"


def test_what_is_wanted_is_not_timed(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rounds(monkeypatch, [], []):
        assert chosen(gpu, tmp_path, "triton") == f"{OURS} ({NOT_WANTED})"
        assert chosen(gpu, tmp_path, "torch") == f"{FLASH} ({NOT_WANTED}; our Triton kernel: it is not wanted)"


def test_what_cannot_be_compiled_costs_a_warning(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler was found\nand other words")

    why = "our Triton kernel: RuntimeError: no compiler was found"
    with rounds(monkeypatch, [], []), monkeypatch.context() as patched:
        patched.setattr(triton_work.TritonWork, "attend", broken)
        assert chosen(gpu, tmp_path) == f"{FLASH} ({NONE}; {why})"
        assert "attention is not computed by our Triton kernel" in caplog.text
        with pytest.raises(
            ConfigError, match=r"^--attention triton does not work on cuda:0: RuntimeError: no comp[^\n]*$"
        ):
            chosen(gpu, tmp_path, "triton")


def test_without_memory_for_a_trial_it_is_the_one_that_needs_less(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "attention_seconds", short)
    assert chosen(gpu, tmp_path) == f"{OURS} ({NONE})"
