"""The compiled kernels against torch, and a model with them against the same model without."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace.engine.runner
from headrace.core.config import EngineConfig
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.attention import choose_attention
from headrace.engine.attention.cpu import CpuPass
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.native import NativePass
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.device import has_wide_vectors
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.int8 import quantize
from headrace.engine.native import onednn
from headrace.engine.native.kernel_calls import Kernels, load_kernels
from tests.cpus import cpuinfo
from tests.engine.attention.passes import attend
from tests.engine.attention.test_cpu import make_spans, poison_unused
from tests.engine.kernels import normal
from tests.engine.models import Prompt, make_runner

PAGES = 96


@pytest.fixture(scope="module", params=["256 bits", "512 bits"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    wide = request.param == "512 bits"
    found = load_kernels(wide=wide, bfloat16=wide)
    if found is None:
        assert shutil.which("gcc") is None or "avx2" not in torch.backends.cpu.get_cpu_capability().lower()
        pytest.skip("no compiler, or a CPU without AVX2")
    if wide and not has_wide_vectors(EngineConfig().cpuinfo):
        pytest.skip("a CPU without AVX-512")
    return found


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 70), width=st.integers(1, 70), wide=st.booleans(), seed=st.integers(0, 99))
def test_elementwise_kernels_equal_torch(kernels: Kernels, rows: int, width: int, wide: bool, seed: int) -> None:
    """Widths that are no multiple of a vector, too. What is rounded to 16 bits is rounded where torch does."""
    plain, dtype = TorchArithmetic(), torch.float32 if wide else torch.bfloat16
    close = 1e-5 if wide else 2**-7  # sums in another order may round to the neighbour

    def numbers(*shape: int, add: int) -> torch.Tensor:
        return normal(*shape, seed=seed + add).to(dtype)

    hidden, delta, weight = numbers(rows, width, add=0), numbers(rows, width, add=1), numbers(width, add=2)
    for change in (None, delta):
        one, other = hidden.clone(), hidden.clone()
        normed = kernels.add_norm(one, change, weight, 1e-5)
        torch.testing.assert_close(normed, plain.add_norm(other, change, weight, 1e-5), atol=close, rtol=close)
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    gate_up = 30 * numbers(rows, 2 * width, add=3)
    torch.testing.assert_close(kernels.gate(gate_up), plain.gate(gate_up), atol=close, rtol=close)
    cos, sin = normal(rows, 1, 2 * width, seed=seed + 4), normal(rows, 1, 2 * width, seed=seed + 5)
    heads = numbers(rows, 5, 2 * width, add=6)  # two heads of five are rotated; the others stay
    one, other = heads.clone(), heads.clone()
    kernels.rotate(one[:, :2], cos, sin)
    plain.rotate(other[:, :2], cos, sin)
    torch.testing.assert_close(one, other, atol=close, rtol=close)


def test_sixteen_bits_are_rounded_as_torch_rounds(kernels: Kernels) -> None:
    """Ties to even, infinity and NaN: sums of all bfloat16 numbers with what makes them ties, and a little more."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for share in (0.0, 2.0**-9, 1.5 * 2.0**-9, -(2.0**-9), 3 * 2.0**-9):
        hidden, delta = every.clone()[None], (every.float() * share).to(torch.bfloat16)[None]
        kernels.add_norm(hidden, delta, torch.ones(len(every), dtype=torch.bfloat16), 1e-5)
        torch.testing.assert_close(hidden, (every + delta[0])[None], atol=0, rtol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(1, 300)), columns=st.integers(1, 150), depth=st.integers(1, 1300),
    bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_equal_torch(kernels: Kernels, rows: int, columns: int, depth: int, bias: bool, seed: int) -> None:
    """Any number of rows, weights that make panels and others, and depths that take several turns."""
    for multiple in (1, 32):
        x, weight = normal(rows, depth, seed=seed), normal(multiple * columns, depth, seed=seed + 1)
        added = normal(multiple * columns, seed=seed + 2) if bias else None
        expected = TorchArithmetic().linear(x.double(), weight, added).float()
        for form in (weight, kernels.pack(weight)):
            torch.testing.assert_close(kernels.linear(x, form, added), expected, atol=3e-4, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(1, 300)), panels=st.integers(1, 5), depth=st.integers(1, 1300),
    form=st.sampled_from(["packed", "8 bits", "not packed", "odd"]), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_product_with_its_gate_has_the_same_bits(
    kernels: Kernels, rows: int, panels: int, depth: int, form: str, dtype: torch.dtype, seed: int
) -> None:
    """As the product, and then the gate."""
    x, weight = normal(rows, depth, seed=seed).to(dtype), normal(64 * panels, depth, seed=seed + 1)
    if form == "8 bits":
        held = kernels.pack(quantize(weight))
    elif form == "packed":
        held = kernels.pack(weight.to(dtype))
    else:
        held = weight[: 64 * panels - 10 if form == "odd" else None].to(dtype)
    expected = kernels.gate(kernels.linear(x, held))
    torch.testing.assert_close(kernels.gated_linear(x, held), expected, atol=0, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(1, 300)), panels=st.integers(1, 9), pairs=st.integers(1, 700),
    bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_in_sixteen_bits_are_rounded_once(
    kernels: Kernels, rows: int, panels: int, pairs: int, bias: bool, seed: int
) -> None:
    """By our own kernel, where the CPU has its instructions. Sums in float32 are close to exact ones."""
    x, weight = normal(rows, 2 * pairs, seed=seed).bfloat16(), normal(32 * panels, 2 * pairs, seed=seed + 1).bfloat16()
    added = normal(32 * panels, seed=seed + 2).bfloat16() if bias else None
    packed = kernels.pack(weight)
    assert kernels.runs(torch.bfloat16) == (isinstance(packed, torch.Tensor) and packed.dim() == 4)
    exact = TorchArithmetic().linear(x.double(), weight, added)
    found = kernels.linear(x, packed, added).double()
    torch.testing.assert_close(found, exact, atol=1e-4 * pairs**0.5, rtol=2**-8)


@pytest.mark.skipif(not onednn.has_bfloat16(), reason="a CPU whose bfloat16 oneDNN does not multiply")
def test_sixteen_bit_matrices_are_packed(kernels: Kernels) -> None:
    """Those that do not make whole panels, and all where our kernels do not multiply them, by oneDNN."""
    x, weight, bias = (normal(*shape).bfloat16() for shape in ((70, 40), (48, 40), (48,)))
    packed = kernels.pack(weight)
    assert packed.is_mkldnn
    torch.testing.assert_close(kernels.linear(x, packed, bias), TorchArithmetic().linear(x, weight, bias))


def test_weights_held_in_16_bits_are_widened(kernels: Kernels) -> None:
    x = normal(5, 32)
    for dtype in (torch.bfloat16, torch.float16):
        for columns in (20, 64):
            held = normal(columns, 32).to(dtype)
            expected = kernels.linear(x, kernels.pack(held.float()))
            torch.testing.assert_close(kernels.linear(x, held), expected, atol=0, rtol=0)
            expected = kernels.logits(x, held.float())
            torch.testing.assert_close(kernels.logits(x, held), expected, atol=0, rtol=0)
            torch.testing.assert_close(expected, TorchArithmetic().logits(x, held.float()))


spans_of = st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(2, 150))), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    shapes=spans_of,
    page_size=st.sampled_from([4, 16, 64]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 16]),
    width=st.sampled_from([6, 16, 64]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 9),
)
def test_attention_equals_plain_sdpa(
    kernels: Kernels,
    shapes: list[tuple[int, int]],
    page_size: int,
    kv_heads: int,
    group: int,
    width: int,
    dtype: str,
    seed: int,
) -> None:
    """Any mix of chunks and single tokens, any heads, any pages in any order, NaN in every other slot."""
    pages = 4 * PAGES * 4 // page_size
    spans = make_spans(shapes, page_size, pages, seed)
    low = KVPool(Geometry(dtype, 2, kv_heads, width, page_size), pages)
    low.tensor.copy_(normal(*low.tensor.shape, seed=seed))
    poison_unused(low, spans)
    high = KVPool(Geometry("float32", 2, kv_heads, width, page_size), pages)
    high.tensor.copy_(low.tensor)
    tokens = sum(count for _, count in shapes)
    heads = normal(tokens, kv_heads * (group + 2), width, seed=seed).to(low.tensor.dtype)
    query, keys_values = heads[:, : kv_heads * group], heads[:, kv_heads * group :]
    wide, rounded, plain = (*(NativePass(low, kernels, spans) for _ in range(2)), SdpaPass(high, spans))
    for layer in range(2):
        expected = attend(plain, layer, query.float(), keys_values.float())
        found = wide.attend(layer, query.float(), keys_values)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        in_16_bits = rounded.attend(layer, query, keys_values)
        assert in_16_bits.dtype == query.dtype
        torch.testing.assert_close(in_16_bits.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(low.tensor.float(), high.tensor, equal_nan=True, atol=0, rtol=0)


def test_very_unlike_scores(kernels: Kernels) -> None:
    """Scores hundreds apart: nothing overflows, and what is negligible is neglected."""
    pool, other = (KVPool(Geometry("float32", 1, 1, 16, 16), 32) for _ in range(2))
    for each in (pool, other):
        each.tensor.zero_()
    spans = [AttentionSpan(0, 300, np.arange(32))]
    heads = 40 * normal(300, 3, 16)
    found = NativePass(pool, kernels, spans).attend(0, heads[:, :1], heads[:, 1:])
    expected = attend(SdpaPass(other, spans), 0, heads[:, :1], heads[:, 1:])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_tensors_of_another_kind_are_refused(kernels: Kernels) -> None:
    """With a wrong stride the kernels would write outside the tensor."""
    with pytest.raises(ValueError, match="do not take"):
        kernels.gate(normal(4, 8).T)
    with pytest.raises(ValueError, match="do not take"):
        kernels.add_norm(normal(4, 8), normal(4, 4), normal(8), 1e-5)
    with pytest.raises(ValueError, match="do not take"):
        kernels.gate(normal(4, 8).half())
    with pytest.raises(ValueError, match="do not take"):
        kernels.rotate(normal(4, 2, 8).double(), normal(4, 1, 8), normal(4, 1, 8))


def test_who_computes_attention(kernels: Kernels) -> None:
    """The kernels where there are any, else torch."""
    spans = [AttentionSpan(0, 1, np.zeros(1, np.int64))]
    for dtype in ("float32", "bfloat16", "float16"):
        pool = KVPool(Geometry(dtype, 1, 1, 16, 16), 2)
        for native_units in (False, True):
            chosen = choose_attention(pool, native_units=native_units, kernels=kernels).begin
            assert isinstance(chosen(spans), NativePass)
        assert isinstance(choose_attention(pool, native_units=True, kernels=None).begin(spans), CpuPass)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_model_without_kernels_says_the_same(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, dtype: str) -> None:
    """Chunks over a prefix, then the sampled token's logprobs: those of a machine without a compiler. On a CPU without
    matrix units, where kernels compute 16-bit models in float32, too."""
    asked = SamplingParams(temperature=0.0, logprobs=5)
    prompt = Prompt(1, [(7 * index) % 4000 + 20 for index in range(200)], list(range(13)), 16)
    answers = []
    for found in (kernels, None):
        with monkeypatch.context() as patch:
            patch.setattr(headrace.engine.runner, "load_kernels", lambda found=found, **_: found)
            runner = make_runner("smollm2", dtype=dtype, cpuinfo=cpuinfo("avx2"))
        for row in prompt.chunks(64)[:-1]:
            runner.execute([row])
        answers.append(runner.execute([prompt.row(192, 8, sample=asked)])[0][0])
    fast, plain = answers
    assert fast.token == plain.token
    assert fast.logprob is not None
    assert plain.logprob is not None
    assert fast.logprob.top_ids == plain.logprob.top_ids
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    torch.testing.assert_close(
        torch.tensor(fast.logprob.top_logprobs), torch.tensor(plain.logprob.top_logprobs), atol=tolerance, rtol=0
    )
