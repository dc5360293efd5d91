"""Limit for benchmarks.peers: seconds of the matrix products of a prefill alone, with torch's math library."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.engine.model.config import ModelSpec

LAYERS = 4  # that have weights of their own; the others use them again
TILE = 256  # queries of one attention product, each with the mean number of keys
DTYPES = ("float32", "bfloat16")


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
