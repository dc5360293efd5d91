"""Prefill tokens/s of a server, HTTP to first token, beside transformers: `python -m benchmarks.prefill`.

Interleaved in one run: each round times the server, then transformers in this process, on the same random prompts
with the same number of threads. While one computes, the other is idle.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.report import console, print_table, prompt, run, spread
from headrace.engine.model.source import resolve_source
from headrace.server.launch.local_server import LocalServer


def transformers_prefill(model: str, dtype: str) -> Callable[[list[int]], None]:
    """A function that computes one prompt and its KV cache in transformers, with its fastest attention (sdpa)."""
    from pathlib import Path

    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(resolve_source(model).path)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if path.suffix == ".gguf":
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    loaded = AutoModelForCausalLM.from_pretrained(str(path), **options).to(getattr(torch, dtype)).eval()

    def compute(ids: list[int]) -> None:
        with torch.inference_mode():
            loaded(torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    return compute


def server_prefill(server: LocalServer) -> Callable[[list[int]], None]:
    """A function that computes one prompt on the server; its KV goes nowhere."""

    def compute(ids: list[int]) -> None:
        body = {"prompt_token_ids": ids, "handoff": "none", "temperature": 0, "max_tokens": 1}
        answer = server.request("POST", "/v1/prefill", body)
        assert answer.status_code == 200, answer.text

    return compute


def rate(compute: Callable[[list[int]], None], ids: list[int]) -> float:
    """Tokens per second."""
    started = time.perf_counter()
    compute(ids)
    return len(ids) / (time.perf_counter() - started)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8000])
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    reference = transformers_prefill(given.model, given.dtype)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--threads", str(given.threads))
    server = LocalServer(*flags, "--no-prefix-cache", "--chunk-tokens", "2048")
    try:
        with console.status("starting a prefill server"):
            server.wait_ready()
        ours = server_prefill(server)
        rows = []
        for length in given.lengths:
            with console.status(f"{length} tokens"):
                reference(prompt(64, 0))
                ours(prompt(64, 1))
                pairs = [
                    (rate(ours, prompt(length, seed)), rate(reference, prompt(length, seed)))
                    for seed in range(2, 2 + given.rounds)
                ]
            ratio = statistics.median(a / b for a, b in pairs)
            rows.append((f"{length:,}", spread([a for a, _ in pairs]), spread([b for _, b in pairs]), f"{ratio:.2f}"))
    finally:
        server.end()
        server.close()
    print_table(
        f"prefill tokens/s, {given.dtype}, {given.threads} threads: median (range) of {given.rounds} rounds",
        ("tokens", "headrace, HTTP to first token", "transformers, sdpa", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
