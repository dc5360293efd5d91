"""What a prefill could be: the products alone, as benchmarks.peers measures them, and the CPU's vector units.

`python -m benchmarks.limit`: what the units of as many cores as threads can do, best of many short loops at a time, and
the share of it that whole passes reach, from tokens to the first sampled one, without a server.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.arguments import add_lengths, add_model, add_rounds, add_threads, make_parser
from benchmarks.profile import loaded_runner, rows_of
from benchmarks.report import console, print_table, prompt, run
from benchmarks.utilisation import chunk_flops
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.source import load_spec, resolve_source

LAYERS = 4  # that have weights of their own; the others use them again
TILE = 256  # queries of one attention product, each with the mean number of keys
DTYPES = ("float32", "bfloat16")
TURNS, LOOPS = 20_000, 200  # of benchmarks/units.c, a few tenths of a millisecond; and how often
CHUNK = 2048  # tokens of a pass


class Limit:
    """Matrix products with the shapes of a model, in the dtype that this machine multiplies fastest."""

    def __init__(self, spec: ModelSpec, dtype: str, chunk_tokens: int) -> None:
        """dtype: of the model; float32 multiplies in float32, bfloat16 in the faster of the two. chunk_tokens: rows of
        a product."""
        self._spec = spec
        self._chunk = chunk_tokens
        heads = spec.heads + 2 * spec.kv_heads
        shapes = (
            (heads * spec.head_dim, spec.hidden_size),
            (spec.hidden_size, spec.heads * spec.head_dim),
            (2 * spec.intermediate_size, spec.hidden_size),
            (spec.hidden_size, spec.intermediate_size),
        )
        choices = {name: [[torch.randn(shape).to(TORCH_DTYPES[name]) for shape in shapes] for _ in range(LAYERS)]
                   for name in DTYPES if name in ("float32", dtype)}  # fmt: skip
        self.dtype = min(choices, key=lambda name: min(self._products(choices[name], 256) for _ in range(2)))
        self._weights = choices[self.dtype]

    def seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of all products of prompts of these lengths: linear layers in full chunks, attention prompt by
        prompt."""
        total = sum(lengths)
        full, rest = divmod(total, self._chunk)
        linear = full * self._products(self._weights, self._chunk) if full else 0.0
        linear += self._products(self._weights, rest) if rest else 0.0
        return linear + sum(lengths.count(length) * self._attention(length) for length in set(lengths))

    def _products(self, weights: list[list[torch.Tensor]], rows: int) -> float:
        """Seconds of all layers' linear products with so many rows, which follow each other as in a forward pass: for
        some milliseconds a core may be faster than it stays."""
        inputs = [torch.randn(rows, weight.shape[1]).to(weight.dtype) for weight in weights[0]]

        layers = cycle(weights)

        def layer() -> None:
            for x, weight in zip(inputs, next(layers), strict=True):
                F.linear(x, weight)

        return _timed(layer, self._spec.layers)

    def _attention(self, length: int) -> float:
        """Seconds of all layers' products with keys and values; a causal mask leaves half of them."""
        spec = self._spec
        rows, keys = min(TILE, length) * spec.heads // spec.kv_heads, max(1, length // 2)
        dtype = TORCH_DTYPES[self.dtype]
        query = torch.randn(spec.kv_heads, rows, spec.head_dim, dtype=dtype)
        cached = torch.randn(spec.kv_heads, keys, spec.head_dim, dtype=dtype)
        tiles = ceil_div(length, TILE)
        full = length / (min(TILE, length) * tiles)  # the last one may be smaller
        return _timed(lambda: torch.bmm(torch.bmm(query, cached.mT), cached), tiles * spec.layers) * full


def _timed(products: Callable[[], object], times: int) -> float:
    """Seconds of so many calls after a first one, which allocates memory for the results."""
    with torch.inference_mode():
        products()
        started = time.perf_counter()
        for _ in range(times):
            products()
        return time.perf_counter() - started


def units_peak(dtype: str, threads: int) -> float:
    """FLOP/s of the vector units of so many cores. Raises ConfigError where there is no compiler, or no instruction."""
    source = Path(__file__).with_name("units.c")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/units.so"
        try:
            subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"what the vector units can do is measured with gcc: {error}") from error
        loop = ctypes.CDLL(library)[dtype]
    loop.argtypes, loop.restype = (ctypes.c_int64,), ctypes.c_int64

    def best(_core: int) -> float:
        rates: list[float] = []
        for _ in range(LOOPS):
            started = time.perf_counter()
            operations = loop(TURNS)
            rates.append(operations / (time.perf_counter() - started))
        return max(rates)

    with ThreadPoolExecutor(threads) as cores:
        total: float = sum(cores.map(best, range(threads)))
    if not total:
        raise ConfigError(f"this CPU has no instructions for sums of products in {dtype}")
    return total


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for an unknown model, and what units_peak() raises."""
    parser = make_parser("limit", __doc__)
    add_model(parser)
    add_threads(parser)
    add_lengths(parser, 512, 2048)
    add_rounds(parser, 7)
    given = parser.parse_args(arguments)
    runner = loaded_runner(given)
    spec, table = load_spec(resolve_source(given.model)), []
    for length in given.lengths:
        rates: list[float] = []
        peaks: list[float] = []
        for number in range(given.rounds):
            with console.status(f"{length} tokens"):
                rows = rows_of(prompt(length, number), CHUNK)
                peaks.append(units_peak(given.dtype, given.threads))
                started = time.perf_counter()
                for row in rows:
                    runner.execute([row])
                rates.append(chunk_flops(spec, length) / (time.perf_counter() - started))
        shares = [rate / peak for rate, peak in zip(rates, peaks, strict=True)]
        table.append((
            f"{length:,}", f"{statistics.median(peaks) / 1e9:.0f}", f"{statistics.median(rates) / 1e9:.0f}",
            f"{statistics.median(shares):.2f}", f"{max(shares):.2f}",
        ))  # fmt: skip
    print_table(
        f"a whole pass and the vector units, {given.dtype}, {given.threads} threads, {given.rounds} rounds",
        ("tokens", "units, GFLOP/s", "pass, GFLOP/s", "share", "best"),
        table,
    )
    return 0


if __name__ == "__main__":
    run(main)
