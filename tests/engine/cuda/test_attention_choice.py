"""Which attention a start on a GPU chooses where FlashInfer is not installed."""

from pathlib import Path

import pytest

from headrace.core.config import AttentionChoice
from headrace.core.types.errors import ConfigError
from headrace.engine.attention import triton_work
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.cuda.models import fake_runner

OURS, FLASH = "our Triton kernel over pages", "torch's flash kernel behind a gather"
NONE = "FlashInfer: it is not installed: pip install 'headrace[flashinfer]'"
NOT_WANTED = "FlashInfer: it is not wanted"


def chosen(gpu: FakeGpu, folder: Path, wanted: AttentionChoice = "auto") -> str:
    with fake_runner(gpu, folder, "llama-3.1-8b", 1, attention=wanted) as made:
        return made._decoder.attention


def test_without_flashinfer_it_is_torchs_flash_kernel(gpu: FakeGpu, tmp_path: Path) -> None:
    assert chosen(gpu, tmp_path) == f"{FLASH} ({NONE})"
    assert chosen(gpu, tmp_path, "torch") == f"{FLASH} ({NOT_WANTED})"


def test_our_kernel_is_for_those_who_ask_for_it(gpu: FakeGpu, tmp_path: Path) -> None:
    assert chosen(gpu, tmp_path, "triton") == OURS


def test_what_is_asked_for_and_cannot_be_compiled_is_an_error(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler was found\nand other words")

    monkeypatch.setattr(triton_work.TritonWork, "attend", broken)
    with pytest.raises(ConfigError, match=r"^--attention triton does not work on cuda:0: RuntimeError: no comp[^\n]*$"):
        chosen(gpu, tmp_path, "triton")
