"""Model FLOP utilisation (MFU) of a forward pass, beside transformers.

`python -m benchmarks.utilisation`, in this process, without a server. A model of a known shape with random weights
computes one chunk, in turns with transformers (sdpa) on the same device and with one large matrix product, whose rate
is taken as the peak.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.arguments import add_rounds, add_threads, make_parser
from benchmarks.profile import PAGE, rows_of
from benchmarks.report import console, print_table, prompt, run, spread
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.device import resolve_device
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.parallel.layer_split import head_flops, layer_flops
from headrace.engine.runner import ModelRunner

_LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama-3-8b": LlamaConfig(
        **_LLAMA, vocab_size=128256, intermediate_size=14336, num_hidden_layers=32, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "qwen3-8b": Qwen3Config(
        **_LLAMA, vocab_size=151936, intermediate_size=12288, num_hidden_layers=36, max_position_embeddings=40960,
        head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
}  # fmt: skip
PEAK_SIZES = {"cuda": 8192, "cpu": 2048}  # rows of the square matrices that measure the peak


def chunk_flops(spec: ModelSpec, tokens: int) -> float:
    """FLOPs of a prompt of one chunk: attention up to the diagonal, one row of the output head."""
    widths = spec.mla.query_dim + spec.mla.value_dim if spec.mla else 2 * spec.head_dim
    attention = 2.0 * spec.heads * widths * tokens * (tokens + 1) / 2
    layers = sum(layer_flops(spec, layer) for layer in range(spec.layers))
    return layers * tokens + spec.layers * attention + head_flops(spec)


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one product of large matrices, best of three."""
    size = PEAK_SIZES[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / min(seconds(device, torch.mm, one, other) for _ in range(3))


def seconds(device: torch.device, compute: Callable[..., object], *arguments: object) -> float:
    """Seconds of compute(*arguments), to the end of its work on the device."""
    synchronize(device)
    started = time.perf_counter()
    compute(*arguments)
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_model(shape: str, device: torch.device, dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    """A model with random weights, saved to the folder as well."""
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            SHAPES[shape], dtype=dtype, attn_implementation="sdpa"
        )
    model.eval().save_pretrained(folder)
    return model


def measure(shape: str, given: argparse.Namespace, device: torch.device, folder: Path) -> list[Sequence[str]]:
    """Rows of the table, one per chunk length."""
    dtype = TORCH_DTYPES[given.dtype]
    with console.status(f"{shape}: making random weights"):
        reference = random_model(shape, device, dtype, folder)
        spec = load_spec(resolve_source(str(folder)))
        longest = max(given.chunks)
        engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(longest, PAGE), threads=given.threads)
        runner = ModelRunner(
            plan_rank(ModelConfig(model=str(folder), dtype=given.dtype, device=str(device)), engine, longest)
        )
        keep_freed_memory()  # as a stage does
        runner.warm_up()

    def ours(ids: list[int]) -> None:
        runner.execute(rows_of(ids, len(ids)))

    def theirs(ids: list[int]) -> None:
        with torch.inference_mode():
            reference(torch.tensor([ids], device=device), use_cache=True, logits_to_keep=1)

    rows: list[Sequence[str]] = []
    for length in given.chunks:
        with console.status(f"{shape}: {length} tokens"):
            prompts = [prompt(length, seed) for seed in range(given.rounds + 1)]
            rounds = [
                (seconds(device, ours, ids), seconds(device, theirs, ids), peak(device, dtype)) for ids in prompts
            ][1:]  # the first has warmed up
        flops = chunk_flops(spec, length)
        own, other, best = (list(column) for column in zip(*rounds, strict=True))
        rows.append((
            shape, f"{length:,}", spread([length / each for each in own]), spread([length / each for each in other]),
            f"{statistics.median(b / a for a, b in zip(own, other, strict=True)):.2f}",
            spread([each / 1e9 for each in best]), share(flops, own, best), share(flops, other, best),
        ))  # fmt: skip
    return rows


def share(flops: float, times: Sequence[float], peaks: Sequence[float]) -> str:
    """Median of each round's share of its peak, as text."""
    return f"{statistics.median(flops / time / best for time, best in zip(times, peaks, strict=True)):.1%}"


def device_name(device: torch.device) -> str:
    """For the table's title."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for a device that is not available."""
    parser = make_parser("utilisation", __doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}; None: smollm2-135m on the CPU, the others on a GPU",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TORCH_DTYPES), help="dtype of weights and KV")
    parser.add_argument(
        "--chunks", type=int, nargs="+", metavar="TOKENS",
        help="tokens of a chunk; None: 512 2048 on the CPU, 2048 8192 32768 on a GPU",
    )  # fmt: skip
    add_threads(parser)
    add_rounds(parser, 5)
    given = parser.parse_args(arguments)
    device = torch.device(resolve_device(given.device))
    torch.set_num_threads(given.threads)
    on_cpu = device.type == "cpu"
    given.chunks = given.chunks or ([512, 2048] if on_cpu else [2048, 8192, 32768])
    rows: list[Sequence[str]] = []
    for shape in given.shapes or (["smollm2-135m"] if on_cpu else ["llama-3-8b", "qwen3-8b"]):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(shape, given, device, Path(folder))
    print_table(
        f"forward passes of one chunk, {given.dtype}, {device_name(device)}: medians of {given.rounds} rounds",
        ("shape", "tokens", "headrace, tokens/s", "transformers, tokens/s", "ratio", "peak, GFLOP/s",
         "headrace, of the peak", "transformers, of the peak"),
        rows,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    run(main)
