"""The compiled arithmetic against torch's, and a model with it against the same model without."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from headrace.core.config import Compile, EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.errors import ConfigError
from headrace.engine.load_plan import plan_rank
from headrace.engine.model import compiled
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.compiled import CompiledArithmetic, choose_arithmetic
from headrace.engine.runner import ModelRunner
from tests.engine.models import GREEDY, Prompt, Saved, random_tokens, reported_logprobs

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor's own import

Models = Callable[[str], Saved]
WIDTH, HEADS, ROTATED = 24, 5, 3  # five heads side by side, three of which are rotated


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: CompiledArithmetic, rows: int, seed: int, dtype: torch.dtype) -> None:
    """As a layer calls it: sums in place, heads turned in place within a wider tensor, others left alone."""
    plain = TorchArithmetic()
    close = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    weight = normal(WIDTH, seed=seed, dtype=dtype)
    hidden = normal(rows, WIDTH, seed=seed + 1, dtype=dtype)
    for delta in (None, normal(rows, WIDTH, seed=seed + 2, dtype=dtype)):
        one, other = hidden.clone(), hidden.clone()
        before = None if delta is None else delta.clone()
        normed = found.add_norm(one, delta, weight, 1e-5)
        torch.testing.assert_close(normed, plain.add_norm(other, delta, weight, 1e-5), atol=close, rtol=close)
        torch.testing.assert_close(one, other, atol=0, rtol=0)
        assert normed.data_ptr() != one.data_ptr()
        assert delta is None or before is None or torch.equal(delta, before)
    cos, sin = (normal(rows, 1, WIDTH, seed=seed + add, dtype=torch.float32) for add in (3, 4))
    heads = normal(rows, HEADS, WIDTH, seed=seed + 5, dtype=dtype)
    one, other = heads.clone(), heads.clone()
    found.rotate(one[:, :ROTATED], cos, sin)
    plain.rotate(other[:, :ROTATED], cos, sin)
    torch.testing.assert_close(one, other, atol=close, rtol=close)
    assert torch.equal(one[:, ROTATED:], heads[:, ROTATED:])
    gate_up = 10 * normal(rows, 2 * WIDTH, seed=seed + 6, dtype=dtype)
    kept = gate_up.clone()
    torch.testing.assert_close(found.gate(gate_up), plain.gate(gate_up), atol=close, rtol=close)
    assert torch.equal(gate_up, kept)


@pytest.fixture(scope="module")
def traced() -> CompiledArithmetic:
    """All of torch.compile but the code that it writes."""
    return CompiledArithmetic("aot_eager")


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 300), seed=st.integers(0, 99), wide=st.booleans())
def test_any_number_of_rows(traced: CompiledArithmetic, rows: int, seed: int, wide: bool) -> None:
    with torch.inference_mode():
        check(traced, rows, seed, torch.float32 if wide else torch.bfloat16)


def make(folder: Path, compile: Compile) -> ModelRunner:
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu")
    runner = ModelRunner(plan_rank(model, EngineConfig(kv_pages=80, threads=1, compile=compile), 512))
    runner.pool.tensor.fill_(float("nan"))  # what was not written must not be read
    runner.warm_up()
    return runner


def plans() -> list[list[PlanRow]]:
    """Chunks of many lengths alone and together, and decoding rows alone and together."""
    lengths = (2, 8, 41, 509)
    pages = [list(range(20 * index, 20 * index + 20)) for index in range(3)] + [list(range(40, 80))]
    one, two, three, four = (Prompt(i, random_tokens(n, i), pages[i], 16) for i, n in enumerate(lengths))
    decoding = {"tokens": b"", "sample": GREEDY}
    return [
        [one.row(0, 2)],
        [two.row(0, 7)],
        [two.row(7, 1)],
        [one.row(2, 1, **decoding)],
        [one.row(3, 1, **decoding), two.row(8, 1, **decoding)],
        [three.row(0, 33), one.row(4, 1, **decoding)],
        [three.row(33, 8), two.row(9, 1, **decoding)],
        [one.row(5, 1, **decoding), two.row(10, 1, **decoding), three.row(41, 1, **decoding)],
        [four.row(0, 500)],
        [four.row(500, 9), one.row(6, 1, **decoding), two.row(11, 1, **decoding)],
    ]  # fmt: skip


def graphs() -> int:
    """How many torch has traced so far in this process."""
    found: int = counters["stats"]["unique_graphs"]
    return found


def check_model(saved: Saved) -> None:
    before = graphs()
    found, expected = make(saved.folder, "on"), make(saved.folder, "off")
    made = graphs()
    assert made > before
    for rows in plans():
        for one, other in zip(found.execute(rows)[0], expected.execute(rows)[0], strict=True):
            assert one.token == other.token
            torch.testing.assert_close(reported_logprobs(one), reported_logprobs(other), atol=2e-4, rtol=2e-4)
    assert graphs() == made  # nothing is compiled after the warm-up


def test_same_tokens_and_nothing_to_compile_later(saved: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CompiledArithmetic", partial(CompiledArithmetic, "aot_eager"))
    check_model(saved("qwen3"))


@pytest.mark.full
def test_same_tokens_with_compiled_code(saved: Models) -> None:
    check_model(saved("llama"))


@pytest.mark.full
def test_compiled_code_takes_any_number_of_rows() -> None:
    found = CompiledArithmetic()
    with torch.inference_mode():
        for rows in (500, 1, 2, 33, 7):
            check(found, rows, seed=rows, dtype=torch.bfloat16)


def test_only_cuda_with_triton_compiles_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TorchArithmetic()
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    for wanted, device in (("auto", "cpu"), ("off", "cpu"), ("off", "cuda"), ("auto", "cuda")):
        assert choose_arithmetic(wanted, device, plain) is plain
    monkeypatch.setattr(compiled, "find_spec", lambda name: object())
    assert choose_arithmetic("auto", "cpu", plain) is plain


class Broken(CompiledArithmetic):
    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gcc\nand other words")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """ConfigError in one line when compilation was configured; else a warning, and plain torch."""
    plain = TorchArithmetic()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    with pytest.raises(ConfigError, match=r"^nothing can be compiled for cpu: .*no-such-compiler.*--compile off$"):
        choose_arithmetic("on", "cpu", plain)
    monkeypatch.setattr(compiled, "find_spec", lambda name: object())
    monkeypatch.setattr(compiled, "CompiledArithmetic", Broken)
    assert choose_arithmetic("auto", "meta", plain) is plain  # the other device that every torch has
    assert "small chunks are slower: no gcc" in caplog.text
