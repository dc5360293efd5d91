"""Passes as one graph of tasks, or in divided steps: the bits of the kernels layer by layer, whichever thread takes
which tile or item when."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from headrace.core.messages.orders import PlanRow
from headrace.engine.attention import native
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.layers import task_graph
from headrace.engine.layers.native_decoder import NativeDecoder
from headrace.engine.layers.task_graph import TaskGraph
from headrace.engine.runner import ModelRunner
from tests.cpus import cpuinfo
from tests.engine.kernels import assert_same_bits
from tests.engine.models import VOCABULARY, Prompt, make_runner, pool_tokens, random_tokens, save_model, shuffled_pages

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES),  # norms of heads
}
PAGE_SIZE = 16


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(config, tmp_path_factory.mktemp(name)).folder for name, config in CONFIGS.items()}


def tasks_of(runner: ModelRunner) -> TaskGraph:
    decoder = runner._decoder
    assert isinstance(decoder, NativeDecoder)
    kernels, precision = decoder._kernels, decoder._precision
    if kernels is None or not kernels.runs(precision.compute) or (precision.int8 and not kernels.runs_int8):
        pytest.skip("no compiler, or a CPU without the instructions")
    assert decoder._tasks is not None
    return decoder._tasks


def computed(runner: ModelRunner, plans: list[list[PlanRow]], tasks: TaskGraph | None) -> list[torch.Tensor]:
    """Hidden states of all plans, and the pool behind them."""
    runner.pool.tensor.fill_(float("nan"))
    decoder = runner._decoder
    assert isinstance(decoder, NativeDecoder)
    with patch.object(decoder, "_tasks", tasks):
        return [*(runner.forward(rows) for rows in plans), runner.pool.tensor.clone()]


@pytest.mark.parametrize(("name", "quantize"), [*((name, "none") for name in CONFIGS), ("llama", "int8")])
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "avx2"), ("float32", "bf16"), ("bfloat16", "bf16")])
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 3), st.integers(20, 100)), min_size=1, max_size=4),
    first=st.integers(0, 150), tile=st.sampled_from([0, 0, 1, 8, 13, 64]), seed=st.integers(1, 1 << 30),
)  # fmt: skip
def test_threads_and_their_order_change_no_bit(
    folders: dict[str, Path], name: str, quantize: str, dtype: str, kind: str, lengths: list[int], first: int,
    tile: int, seed: int,
) -> None:  # fmt: skip
    """Several requests, of which each has been computed up to some position before; threads take tiles, or items of
    steps, at random and are held up at random. Segments are short, so that attention of single rows is divided."""
    runner = make_runner(folders[name], dtype=dtype, cpuinfo=cpuinfo(kind), max_model_len=256, quantize=quantize)
    tasks, pages, prompts = tasks_of(runner), shuffled_pages(64, 64, seed), []
    for request, length in enumerate(lengths):
        taken = -(-(length + first) // PAGE_SIZE)
        prompts.append(Prompt(request, random_tokens(length + first, request), pages[:taken], PAGE_SIZE))
        pages = pages[taken:]
    before = [prompt.row(0, first) for prompt in prompts]
    plans = [*([before] if first else []), [prompt.row(first, len(prompt.tokens) - first) for prompt in prompts]]
    with patch.object(native, "SEGMENT", 128):
        expected = computed(runner, plans, None)
    with patch.object(native, "SEGMENT", 128), patch.object(TaskGraph, "tile_rows", return_value=tile):
        for count in (1, 2, 3):
            for tasks.seed in (0, seed):
                with threads(count):
                    found = computed(runner, plans, tasks)
                for one, other in zip(found, expected, strict=True):
                    assert_same_bits(one, other)


def test_layers_are_counted(folders: dict[str, Path]) -> None:
    runner = make_runner(folders["llama"], cpuinfo=cpuinfo("avx2"))
    tasks = tasks_of(runner)
    prompt = Prompt(1, random_tokens(200), list(range(13)), PAGE_SIZE)
    for used, rows in ((tasks, 8), (tasks, 0), (None, 0)):
        before = runner.progress.steps
        with patch.object(TaskGraph, "tile_rows", return_value=rows):
            computed(runner, [[prompt.row(0, 200)]], used)
        assert runner.progress.steps == before + SIZES["num_hidden_layers"]


@pytest.mark.parametrize(("whole", "rows"), [(True, 8), (True, 0), (False, 0)])
def test_a_pass_that_is_cancelled_ends_and_leaves_the_next_one_as_it_is(
    folders: dict[str, Path], whole: bool, rows: int
) -> None:
    """By the graph, in divided steps, and kernel by kernel; before it begins, and while threads compute that are held
    up at random."""
    runner = make_runner(folders["llama"], cpuinfo=cpuinfo("avx2"))
    tasks, progress = tasks_of(runner), runner.progress
    assert runner.cancels
    prompt = Prompt(1, random_tokens(200), list(range(13)), PAGE_SIZE)
    plans = [[prompt.row(0, 200)]]
    used = tasks if whole else None
    expected = computed(runner, plans, used)
    progress.begin(1)
    progress.cancel(1)
    before = progress.steps
    computed(runner, plans, used)
    assert progress.steps == before
    with threads(3), patch.object(TaskGraph, "tile_rows", return_value=rows):
        for number in range(2, 12):
            tasks.seed = number
            progress.begin(number)
            timer = Timer(0.002 * number, progress.cancel, (number,))
            timer.start()
            computed(runner, plans, used)
            timer.join()
            progress.begin(0)
            for one, other in zip(computed(runner, plans, used), expected, strict=True):
                assert_same_bits(one, other)


def test_few_rows_for_many_threads_are_one_tile(folders: dict[str, Path]) -> None:
    tasks = tasks_of(make_runner(folders["llama"], cpuinfo=cpuinfo("avx2")))

    def rows(*spans: tuple[int, int]) -> int:
        return tasks.tile_rows([AttentionSpan(start, count, np.zeros(1, np.int64)) for start, count in spans])

    assert rows((0, 1)) == rows((0, 5000)) == task_graph.TILE_ROWS[0]
    with threads(4):
        assert rows((0, 1)) == rows((0, 200)) == 0
        assert rows((0, 400)) == 48
        assert rows((0, 512)) == 32
        assert rows((0, 1100)) == 64
        assert rows((0, 5000)) == rows(*[(0, 100)] * 50) == task_graph.TILE_ROWS[0]
        single = [(8000, 1)] * 32  # of which one tile would take longer than all the others
        assert rows(*single, (0, 2048)) == 0


def test_tiles_of_weights_in_8_bits_have_more_rows(folders: dict[str, Path]) -> None:
    tasks = tasks_of(make_runner(folders["llama"], cpuinfo=cpuinfo("avx2"), quantize="int8"))
    chunk = [AttentionSpan(0, 2000, np.zeros(1, np.int64))]
    assert tasks.tile_rows(chunk) == task_graph.INT8_TILE_ROWS[0] > task_graph.TILE_ROWS[0]
    with threads(2):
        assert tasks.tile_rows(chunk) == task_graph.INT8_TILE_ROWS[0]
    with threads(4):
        assert tasks.tile_rows(chunk) == task_graph.TILE_ROWS[0]


def test_the_whole_model_is_computed_so(folders: dict[str, Path]) -> None:
    """What is chosen for a model: with keys and values of another dtype than the computation, the kernels."""
    runner = make_runner(folders["llama"], dtype="bfloat16", cpuinfo=cpuinfo("avx2"))  # computed in float32
    decoder = runner._decoder
    assert isinstance(decoder, NativeDecoder)
    assert decoder._tasks is None
    prompt = Prompt(1, random_tokens(40), [0, 1, 2], PAGE_SIZE)
    runner.forward([prompt.row(0, 40)])
    assert not pool_tokens(runner, prompt.pages, 40).isnan().any()
