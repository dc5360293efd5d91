"""Profile of a prefill: tokens/s, shares of products, attention and the rest, and ms spent outside the forward pass.

`python -m benchmarks.profile`. First in this process, without a server, by part of the forward pass: matrix products of
the linear layers, attention (with its reads and writes of the pool), and the rest (norms, rotary embedding, activation,
residuals, copies, Python). Then through a server: the time that the client waited and its stage did not compute, which
is HTTP, scheduling, planning and sending.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

from benchmarks.arguments import add_lengths, add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run
from benchmarks.server import plan_seconds, prefill_seconds, serving
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types import packed
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.attention.paged import AttentionPass
from headrace.engine.layers.native_decoder import NativeDecoder
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner
from headrace.server.launch.local_server import LocalServer

PAGE = 16  # tokens
MAX_TOKENS = 8192  # positions of the pool
P = ParamSpec("P")
R = TypeVar("R")


def rows_of(ids: Sequence[int], chunk: int) -> list[PlanRow]:
    """Rows that compute a prompt in chunks of so many tokens, one plan each."""
    rows = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        end = start + len(part)
        sample = SamplingParams(temperature=0.0) if end == len(ids) else None
        rows.append(
            PlanRow(1, start, len(part), packed.pack(range(ceil_div(end, PAGE))), packed.pack(part), sample=sample)
        )
    return rows


class Stopwatch:
    """Sums the time of calls."""

    def __init__(self) -> None:
        """At zero."""
        self.seconds = 0.0

    def timed(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, with its calls timed."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            return result

        return call


class TimedPass:
    """An AttentionPass whose calls are timed, with their reads and writes of the pool."""

    def __init__(self, running: AttentionPass, watch: Stopwatch) -> None:
        """Wrap a pass."""
        self.slots = running.slots
        self.attend = watch.timed(running.attend)


def by_part(runner: ModelRunner, rows: Sequence[PlanRow]) -> tuple[float, float, float]:
    """Seconds of products, attention and the rest, one plan per row."""
    products, attention = Stopwatch(), Stopwatch()
    decoder = runner._decoder
    assert isinstance(decoder, NativeDecoder)
    arithmetic, begin = decoder._arithmetic, decoder._attention
    assert begin is not None
    with (
        patch.object(arithmetic, "linear", products.timed(arithmetic.linear)),
        patch.object(arithmetic, "gated_linear", products.timed(arithmetic.gated_linear)),
        patch.object(arithmetic, "logits", products.timed(arithmetic.logits)),
        patch.object(decoder, "_attention", lambda spans: TimedPass(begin(spans), attention)),
    ):
        started = time.perf_counter()
        for row in rows:
            runner.execute([row])
        total = time.perf_counter() - started
    return products.seconds, attention.seconds, total - products.seconds - attention.seconds


def outside_forward(server: LocalServer, ids: list[int]) -> tuple[float, float]:
    """Seconds that the client waited, and those of them in which the stage did not compute."""
    before = plan_seconds(server)
    total = prefill_seconds(server, ids)
    return total, total - (plan_seconds(server) - before)


def loaded_runner(given: argparse.Namespace) -> ModelRunner:
    """The model on this CPU, as a stage would have it. Raises ConfigError for an unknown one."""
    engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(MAX_TOKENS, PAGE), threads=given.threads)
    runner = ModelRunner(plan_rank(ModelConfig(model=given.model, dtype=given.dtype, device="cpu"), engine, MAX_TOKENS))
    keep_freed_memory()
    runner.warm_up()
    return runner


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for an unknown model, ServerFailed."""
    parser = make_parser("profile", __doc__)
    add_model(parser)
    add_threads(parser)
    parser.add_argument("--chunk-tokens", type=int, default=2048, metavar="TOKENS", help="tokens of a chunk")
    add_lengths(parser, 128, 512, 2048, 8000)
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    runner = loaded_runner(given)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--threads", str(given.threads))
    table = []
    with serving(*flags, "--no-prefix-cache", "--chunk-tokens", str(given.chunk_tokens)) as server:
        for length in given.lengths:
            with console.status(f"{length} tokens"):
                ids = [prompt(length, seed) for seed in range(given.rounds)]
                inside = [by_part(runner, rows_of(tokens, given.chunk_tokens)) for tokens in ids]
                outside = [outside_forward(server, tokens) for tokens in ids]
            parts = [statistics.median(shares) for shares in zip(*([part / sum(row) for part in row] for row in inside),
                                                                 strict=True)]  # fmt: skip
            rate = statistics.median(length / sum(row) for row in inside)
            left = statistics.median(1000 * rest for _, rest in outside)
            share = statistics.median(rest / total for total, rest in outside)
            table.append((f"{length:,}", f"{rate:,.0f}", *(f"{part:.1%}" for part in parts), f"{left:.1f}",
                          f"{share:.1%}"))  # fmt: skip
    print_table(
        f"where the time goes, {given.dtype}, {torch.get_num_threads()} threads: medians of {given.rounds} rounds",
        ("tokens", "tokens/s, forward pass", "products", "attention", "rest", "outside it, ms", "of the client's time"),
        table,
    )
    return 0


if __name__ == "__main__":
    run(main)
