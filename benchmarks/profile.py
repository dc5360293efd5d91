"""Where the time of a prefill goes: `python -m benchmarks.profile`.

First in this process, without a server, by part of the forward pass: matrix products of the linear layers, attention
(with its reads and writes of the pool), and the rest (norms, rotary embedding, activation, residuals, copies, Python).
Then through a server whose KV goes nowhere: what its stage was busy with, by its own count, and what is left of the
time that the client saw, which is HTTP, scheduling, planning and sending.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

from benchmarks.overhead import computed
from benchmarks.prefill import server_prefill
from benchmarks.report import console, print_table, prompt, run
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types import packed
from headrace.core.types.request import SamplingParams
from headrace.engine.attention.base import Attention, AttentionPass, AttentionSpan
from headrace.engine.runner import ModelRunner
from headrace.server.launch.local_server import LocalServer

PAGE = 16
P = ParamSpec("P")
R = TypeVar("R")


def rows_of(ids: Sequence[int], chunk: int) -> list[PlanRow]:
    """One prompt, a plan for each row."""
    rows = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        end = start + len(part)
        sample = SamplingParams(temperature=0.0) if end == len(ids) else None
        rows.append(PlanRow(1, start, len(part), packed.pack(range(-(-end // PAGE))), packed.pack(part), sample=sample))
    return rows


class Stopwatch:
    """Adds up the time of the calls that go through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            return result

        return call


class TimedPass:
    def __init__(self, running: AttentionPass, watch: Stopwatch) -> None:
        self.attend = watch.timed(running.attend)


class TimedAttention:
    """An Attention whose passes are timed, reads and writes of the pool included."""

    def __init__(self, attention: Attention, watch: Stopwatch) -> None:
        self._attention = attention
        self._watch = watch

    def begin(self, spans: Sequence[AttentionSpan]) -> AttentionPass:
        return TimedPass(self._attention.begin(spans), self._watch)


def by_part(runner: ModelRunner, rows: Sequence[PlanRow]) -> tuple[float, float, float]:
    """Seconds of products, attention and everything else."""
    products, attention = Stopwatch(), Stopwatch()
    arithmetic = runner._decoder._arithmetic
    with (
        patch.object(arithmetic, "linear", products.timed(arithmetic.linear)),
        patch.object(runner, "_attention", TimedAttention(runner._attention, attention)),
    ):
        started = time.perf_counter()
        for row in rows:
            runner.execute([row])
        total = time.perf_counter() - started
    return products.seconds, attention.seconds, total - products.seconds - attention.seconds


def around(server: LocalServer, ids: list[int]) -> tuple[float, float]:
    """Seconds that the client saw, and those of them in which the stage did not compute."""
    before = computed(server)
    started = time.perf_counter()
    server_prefill(server)(ids)
    seen = time.perf_counter() - started
    return seen, seen - (computed(server) - before)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    engine = EngineConfig(page_size=PAGE, kv_pages=-(-8192 // PAGE), threads=given.threads)
    runner = ModelRunner(ModelConfig(model=given.model, dtype=given.dtype, device="cpu"), engine, 8192)
    keep_freed_memory()  # as a stage does
    runner.warm_up()
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--threads", str(given.threads))
    server = LocalServer(*flags, "--no-prefix-cache", "--chunk-tokens", str(given.chunk_tokens))
    table = []
    try:
        with console.status("starting a prefill server"):
            server.wait_ready()
        for length in given.lengths:
            with console.status(f"{length} tokens"):
                ids = [prompt(length, seed) for seed in range(given.rounds)]
                inside = [by_part(runner, rows_of(tokens, given.chunk_tokens)) for tokens in ids]
                outside = [around(server, tokens) for tokens in ids]
            parts = [statistics.median(shares) for shares in zip(*([part / sum(row) for part in row] for row in inside),
                                                                 strict=True)]  # fmt: skip
            rate = statistics.median(length / sum(row) for row in inside)
            left = statistics.median(1000 * rest for _, rest in outside)
            share = statistics.median(rest / seen for seen, rest in outside)
            table.append((f"{length:,}", f"{rate:,.0f}", *(f"{part:.1%}" for part in parts), f"{left:.1f}",
                          f"{share:.1%}"))  # fmt: skip
    finally:
        server.end()
        server.close()
    print_table(
        f"where the time goes, {given.dtype}, {torch.get_num_threads()} threads: medians of {given.rounds} rounds",
        ("tokens", "tokens/s, forward pass", "products", "attention", "rest", "around it, ms", "of what a client sees"),
        table,
    )
    return 0


if __name__ == "__main__":
    run(main)
