"""Prefill tokens/s of a server, HTTP to first token, beside transformers.

`python -m benchmarks.prefill`. Interleaved in one run: each round times the server, then transformers in this process,
on the same random prompts with the same number of threads. While one computes, the other is idle.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.arguments import add_lengths, add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_seconds, serving
from headrace.engine.model.source import resolve_source


def transformers_prefill(model: str, dtype: str) -> Callable[[list[int]], float]:
    """A function that computes one prompt and its KV cache in transformers with sdpa attention; returns its seconds."""
    from pathlib import Path

    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(resolve_source(model).path)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if path.suffix == ".gguf":
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    loaded = AutoModelForCausalLM.from_pretrained(str(path), **options).to(getattr(torch, dtype)).eval()

    def seconds(ids: list[int]) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            loaded(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started

    return seconds


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for an unknown model, ServerFailed."""
    parser = make_parser("prefill", __doc__)
    add_model(parser)
    add_threads(parser)
    add_rounds(parser, 3)
    add_lengths(parser, 512, 2048, 8000)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    reference = transformers_prefill(given.model, given.dtype)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--threads", str(given.threads))
    rows = []
    with serving(*flags, "--no-prefix-cache", "--chunk-tokens", "2048") as server:
        for length in given.lengths:
            with console.status(f"{length} tokens"):
                reference(prompt(64, 0))  # warm-up
                prefill_seconds(server, prompt(64, 1))
                prompts = [prompt(length, seed) for seed in range(2, 2 + given.rounds)]
                pairs = [(length / prefill_seconds(server, ids), length / reference(ids)) for ids in prompts]
            ratio = statistics.median(a / b for a, b in pairs)
            rows.append((f"{length:,}", spread([a for a, _ in pairs]), spread([b for _, b in pairs]), f"{ratio:.2f}"))
    print_table(
        f"prefill tokens/s, {given.dtype}, {given.threads} threads: median (range) of {given.rounds} rounds",
        ("tokens", "headrace, HTTP to first token", "transformers, sdpa", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
