"""When the kernels for GPUs are used; what is said where they do not work."""

from typing import Any

import pytest
import torch

from headrace.core.types.errors import ConfigError
from headrace.engine import triton
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.triton import choose_arithmetic
from headrace.engine.triton.arithmetic import TritonArithmetic


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "find_spec", lambda _: object())


@pytest.mark.usefixtures("installed")
def test_where_triton_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonArithmetic, "gate", lambda *_: torch.zeros(1))
    plain = TorchArithmetic()
    for wanted, device in (("auto", "cpu"), ("off", "cpu"), ("off", "meta")):
        assert choose_arithmetic(wanted, device, plain) is plain
    for wanted in ("auto", "on", "products"):
        assert isinstance(choose_arithmetic(wanted, "meta", plain), TritonArithmetic)


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton, "find_spec", lambda _: None)
    plain = TorchArithmetic()
    assert choose_arithmetic("auto", "meta", plain) is plain
    assert "every pass is slower: Triton is not installed" in caplog.text
    for wanted in ("on", "products"):
        with pytest.raises(ConfigError, match=r"^nothing can be compiled for meta: Triton is not installed; .*off$"):
            choose_arithmetic(wanted, "meta", plain)


@pytest.mark.usefixtures("installed")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no gcc\nand other words")

    monkeypatch.setattr(TritonArithmetic, "gate", broken)
    plain = TorchArithmetic()
    assert choose_arithmetic("auto", "meta", plain) is plain
    assert "every pass is slower: no gcc" in caplog.text
    with pytest.raises(ConfigError, match=r"^nothing can be compiled for meta: no gcc; write --compile off$"):
        choose_arithmetic("on", "meta", plain)


def test_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"for cpu: its kernels are compiled at installation; write --compile off$"):
        choose_arithmetic("on", "cpu", TorchArithmetic())
