"""The same bits for a prompt whatever happens around it: chunks, batches, cached prefixes, stages. On the CPU."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import EngineConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.attention import native as native_attention
from headrace.engine.attention.native import NativePass
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.device import cpu_flags
from headrace.engine.kv.pool import KVPool
from headrace.engine.native.kernel_calls import Kernels, load_kernels
from headrace.engine.runner import ModelRunner
from tests.cpus import KINDS, cpuinfo
from tests.engine.kernels import WIDTHS, assert_same_bits, native, normal
from tests.engine.models import CONFIGS, Prompt, Saved, make_runner, pool_tokens, random_tokens, shuffled_pages

# Rows at which math libraries change from one kernel to another.
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 512, 513]
PAGE_SIZE = 16
TOKENS = 4  # sampled after each prompt


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("columns", "depth"),
    [
        (960, 576),
        (1000, 64),
        *(pytest.param(*size, marks=pytest.mark.full) for size in ((576, 1536), (3072, 576), (2048, 2048))),
    ],
)
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(
    columns: int, depth: int, dtype: torch.dtype, wide: bool
) -> None:
    kernels = native(wide)
    x, weight, bias = normal(520, depth).to(dtype), normal(columns, depth, seed=1).to(dtype), normal(columns).to(dtype)
    for form in (weight, kernels.pack(weight)):
        whole = kernels.linear(x, form, bias)
        for rows in ROWS:
            assert_same_bits(kernels.linear(x[:rows], form, bias), whole[:rows])
            first = 520 - rows
            assert_same_bits(kernels.linear(x[first:], form, bias), whole[first:])


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_kernels_do_not_depend_on_the_number_of_rows(dtype: torch.dtype, wide: bool) -> None:
    kernels = native(wide)
    hidden, delta, weight = normal(40, 100).to(dtype), normal(40, 100, seed=1).to(dtype), normal(100).to(dtype)
    heads, cos, sin = normal(40, 5, 20).to(dtype), normal(40, 1, 20, seed=2), normal(40, 1, 20, seed=3)

    def results(rows: slice) -> tuple[torch.Tensor, ...]:
        rotated = heads[rows].clone()
        kernels.rotate(rotated, cos[rows].contiguous(), sin[rows].contiguous())
        return (
            kernels.add_norm(hidden[rows].clone(), delta[rows].contiguous(), weight, 1e-5),
            kernels.gate(hidden[rows].contiguous()),
            rotated,
        )

    whole = results(slice(0, 40))
    for rows in (slice(0, 1), slice(39, 40), slice(3, 20)):
        for one, other in zip(results(rows), whole, strict=True):
            assert_same_bits(one, other[rows])


cuts = st.lists(st.one_of(st.integers(1, 2), st.integers(1, 200)), min_size=1, max_size=6)


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("emulated", [False, True])
@settings(max_examples=20, deadline=None)
@given(
    chunks=cuts, others=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 70)), max_size=3),
    page_size=st.sampled_from([4, 16, 64]), group=st.sampled_from([1, 3, 7]), width=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]), rounded=st.booleans(),
    spread=st.sampled_from([1.0, 6.0]), segment=st.sampled_from([128, 2048]), seed=st.integers(0, 9),
)  # fmt: skip
def test_attention_does_not_depend_on_chunks_and_batches(
    emulated: bool, wide: bool, chunks: list[int], others: list[tuple[int, int]], page_size: int, group: int,
    width: int, dtype: str, rounded: bool, spread: float, segment: int, seed: int,
) -> None:  # fmt: skip
    """A prompt as one chunk alone, and in chunks beside others, of which few rows are split among threads by segments.
    Scores hundreds apart make the kernel for bfloat16 compute tiles again, for single rows of a vector. Emulated: as on
    a CPU without its instructions."""
    kernels = native(wide) if not emulated else emulating(wide)
    count, kv_heads = sum(chunks), 2
    pages = np.random.default_rng(seed).permutation(2000 // page_size + 200)
    own, rest = pages[: -(-count // page_size)], pages[-(-count // page_size) :]
    pool_dtype = getattr(torch, dtype)
    query_dtype = pool_dtype if rounded else torch.float32
    heads = (spread * normal(count, kv_heads * (group + 2), width, seed=seed)).to(query_dtype)
    query, keys_values = heads[:, : kv_heads * group], heads[:, kv_heads * group :]

    def attended(sizes: list[int], beside: list[tuple[int, int]]) -> torch.Tensor:
        pool = KVPool(Geometry(dtype, 1, kv_heads, width, page_size), len(pages))
        pool.tensor.fill_(float("nan"))
        results, start = [], 0
        for size in sizes:
            spans, left = [AttentionSpan(start, size, own[: -(-(start + size) // page_size)])], rest
            for first, more in beside:
                taken = -(-(first + more) // page_size)
                pool.tensor[left[:taken]] = 1.0
                spans.append(AttentionSpan(first, more, left[:taken]))
                left = left[taken:]
            extra = normal(sum(more for _, more in beside), *query.shape[1:]).to(query.dtype)
            extra_kv = normal(len(extra), *keys_values.shape[1:]).to(query.dtype)
            batch = torch.cat((query[start : start + size], extra))
            batch_kv = torch.cat((keys_values[start : start + size], extra_kv))
            results.append(NativePass(pool, kernels, spans).attend(0, batch, batch_kv)[:size])
            start += size
        return torch.cat(results)

    with patch.object(native_attention, "SEGMENT", segment):
        with patch.object(torch, "get_num_threads", lambda: 4):
            in_chunks = attended(chunks, others)
        assert_same_bits(in_chunks, attended([count], []))


def emulating(wide: bool) -> Kernels:
    """Kernels with the emulation of what this CPU may have."""
    found = load_kernels(wide=wide, bfloat16=True, emulate=True)
    if found is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    return found


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 300), page_size=st.sampled_from([4, 16]), group=st.sampled_from([1, 3, 16]),
    width=st.sampled_from([16, 64, 80, 128, 256]), spread=st.sampled_from([1.0, 6.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_the_emulation_of_bfloat16_attention_equals_the_instructions(
    count: int, page_size: int, group: int, width: int, spread: float, seed: int
) -> None:
    if not {"avx512_bf16", "avx512vl"} <= flags_of_this_cpu():
        pytest.skip("a CPU without AVX512-BF16")
    heads = (spread * normal(count, group + 2, width, seed=seed)).bfloat16()
    pages = np.random.default_rng(seed).permutation(-(-count // page_size))
    results = []
    for kernels in (native(True), emulating(True)):
        pool = KVPool(Geometry("bfloat16", 1, 1, width, page_size), len(pages))
        pool.tensor.fill_(float("nan"))
        with patch.object(native_attention, "SEGMENT", 128):
            running = NativePass(pool, kernels, [AttentionSpan(0, count, pages)])
            results.append(running.attend(0, heads[:, :group], heads[:, group:]))
    assert_same_bits(*results)


def flags_of_this_cpu() -> frozenset[str]:
    return cpu_flags(EngineConfig().cpuinfo)


class Computed(NamedTuple):
    """What is known of a prompt after it: tokens and logprobs as bytes, and its keys and values."""

    tokens: list[int]
    logprobs: list[torch.Tensor]
    kv: torch.Tensor


class Job:
    """A prompt and its greedy continuation, over pages of its own."""

    def __init__(self, request: int, prompt: list[int], pages: list[int]) -> None:
        self.prompt = Prompt(request, list(prompt), pages, PAGE_SIZE)
        self.length = len(prompt)
        self.done = 0
        self.tokens: list[int] = []
        self.logprobs: list[torch.Tensor] = []

    @property
    def left(self) -> int:
        return len(self.prompt.tokens) - self.done

    def row(self, count: int) -> PlanRow:
        row = self.prompt.row(self.done, count)
        self.done += count
        return row

    def sampled(self, token: int, logprobs: torch.Tensor) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprobs)
        if len(self.tokens) < TOKENS:
            self.prompt.tokens.append(token)


Execute = Callable[[list[PlanRow]], Any]


def compute(execute: Execute, jobs: list[Job], plans: Any) -> None:
    """Run jobs to their ends. plans: yields lists of (job, tokens)."""
    for plan in plans:
        rows = [job.row(count) for job, count in plan]
        by_request = {sampled.request: sampled for sampled in execute(rows).samples}
        for job, _ in plan:
            sampled = by_request.get(job.prompt.request)
            if sampled is not None:
                entry = sampled.logprob
                assert entry is not None
                order = np.argsort(entry.top_ids)
                job.sampled(sampled.token, torch.tensor(entry.top_logprobs)[torch.from_numpy(order)])


def alone(jobs: list[Job]) -> Any:
    """Whole prompts, one after the other."""
    for job in jobs:
        while len(job.tokens) < TOKENS:
            yield [(job, job.left)]


def mixed(jobs: list[Job], data: st.DataObject) -> Any:
    """Any chunks of any prompts in any order."""
    while any(len(job.tokens) < TOKENS for job in jobs):
        live = [job for job in jobs if len(job.tokens) < TOKENS]
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
        yield [(job, data.draw(st.integers(1, min(job.left, 64)))) for job in chosen]


def staged(runners: list[ModelRunner]) -> Execute:
    """The stages of one model, one after the other."""

    def execute(rows: list[PlanRow]) -> Any:
        hidden = None
        for runner in runners:
            hidden = runner.forward(rows, hidden)
        assert hidden is not None
        return runners[-1].sample(rows, hidden).result()

    return execute


MODELS = (
    ("llama", "auto"), ("qwen3", "auto"), ("qwen3-moe", "auto"), ("deepseek-v2", "auto"), ("deepseek-v3", "auto"),
    ("deepseek-v3", "expanded"),
)  # fmt: skip
FORMS = (("float32", "none", "avx2"), ("bfloat16", "none", "bf16"), ("bfloat16", "int8", "bf16"))


def cases() -> list[Any]:
    """Every model in every dtype on every kind of CPU; all but the native one of each dtype in the full run only, and
    in bfloat16 expanded latents, too."""

    def marks(model: tuple[str, str], *form: str) -> Any:
        return () if form in FORMS and (model[1], form[0]) != ("expanded", "bfloat16") else pytest.mark.full

    return [
        pytest.param(*model, dtype, quantize, kind, marks=marks(model, dtype, quantize, kind))
        for model in MODELS
        for dtype, quantize, _ in FORMS
        for kind in KINDS
    ]


@pytest.mark.parametrize(("name", "mla", "dtype", "quantize", "kind"), cases())
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_prompt_does_not_depend_on_chunks_batches_and_stages(
    saved: Callable[[str], Saved], name: str, mla: str, dtype: str, quantize: str, kind: str, data: st.DataObject
) -> None:
    """Keys and values, logprobs of the whole vocabulary, and greedy tokens."""
    folder, layers = saved(name).folder, CONFIGS[name].num_hidden_layers
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    prompts = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    cut = data.draw(st.integers(1, layers - 1))

    def run(splits: list[range], mix: bool) -> list[Computed]:
        runners = [
            make_runner(
                folder,
                dtype=dtype,
                quantize=quantize,
                layers=layers_of,
                cpuinfo=cpuinfo(kind),
                max_model_len=256,
                mla=mla,
            )
            for layers_of in splits
        ]
        order = shuffled_pages(64, 64, seed=len(splits))
        jobs = []
        for number, prompt in enumerate(prompts):
            taken = -(-(len(prompt) + TOKENS) // PAGE_SIZE)
            jobs.append(Job(number + 1, prompt, order[:taken]))
            order = order[taken:]
        compute(staged(runners), jobs, mixed(jobs, data) if mix else alone(jobs))
        parts = [
            torch.cat([pool_tokens(runner, job.prompt.pages, len(job.prompt.tokens)) for runner in runners])
            for job in jobs
        ]
        return [Computed(job.tokens, job.logprobs, kv) for job, kv in zip(jobs, parts, strict=True)]

    expected = run([range(layers)], mix=False)
    for splits in ([range(layers)], [range(cut), range(cut, layers)]):
        for one, other in zip(run(splits, mix=True), expected, strict=True):
            assert one.tokens == other.tokens
            assert_same_bits(torch.stack(one.logprobs), torch.stack(other.logprobs))
            assert_same_bits(one.kv, other.kv)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_the_bundled_model_in_chunks_of_any_size(dtype: str) -> None:
    """Matrices of a real model, in the dtype that this CPU would compute it in."""
    kind = "bf16" if dtype == "bfloat16" and "avx512_bf16" in flags_of_this_cpu() else "avx2"
    asked = SamplingParams(temperature=0.0, logprobs=20)
    runner = make_runner("smollm2", dtype=dtype, cpuinfo=cpuinfo(kind), max_model_len=512)
    prompt = Prompt(1, [(7 * index) % 4000 + 20 for index in range(330)], list(range(21)), PAGE_SIZE)
    found = []
    for size in (330, 256, 33, 129):
        runner.pool.tensor.fill_(float("nan"))
        for start in range(0, 330, size):
            count = min(size, 330 - start)
            row = prompt.row(start, count, **({"sample": asked} if start + count == 330 else {}))
            samples = runner.execute([row]).samples
        entry = samples[0].logprob
        assert entry is not None
        kv = pool_tokens(runner, prompt.pages, 330)
        found.append((samples[0].token, entry.top_ids, torch.tensor(entry.top_logprobs), kv))
    for token, ids, logprobs, kv in found[1:]:
        assert (token, ids) == found[0][:2]
        assert_same_bits(logprobs, found[0][2])
        assert_same_bits(kv, found[0][3])
