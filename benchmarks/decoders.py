"""Our own layers beside transformers' modules over the same pool: prefill tokens/s, and the ratio of their times.

`python -m benchmarks.decoders`. Random models of eight families in float32, on the same prompts in turns, in one
process: forward passes without a server. A ratio above 1: the library takes longer. Times are of the CPU, so that
other processes disturb less.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_lengths, add_rounds, add_threads, make_parser
from benchmarks.profile import PAGE, rows_of
from benchmarks.report import console, print_table, run, spread
from headrace.core.config import DecoderChoice, EngineConfig, ModelConfig
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner

POSITIONS = 4096
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": POSITIONS,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
LATENT: dict[str, Any] = {
    **SIZES,
    **EXPERTS,
    "num_key_value_heads": 12,
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", SIZES),
    "Mistral": ("mistral", {**SIZES, "sliding_window": None}),
    "Qwen2": ("qwen2", SIZES),
    "Qwen3": ("qwen3", {**SIZES, "head_dim": 64}),
    "Mixtral": ("mixtral", {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024}),
    "Qwen3-MoE": ("qwen3_moe", {**SIZES, **EXPERTS, "head_dim": 64, "num_experts": 16}),
    "DeepSeek-V2": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    "DeepSeek-V3": ("deepseek_v3", {**LATENT, "q_lora_rank": 384}),
}


def save_model(folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    """A random model."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).save_pretrained(folder)


def make_runner(folder: Path, decoder: DecoderChoice, threads: int) -> ModelRunner:
    """A runner that has computed once."""
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu", decoder=decoder)
    engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(POSITIONS, PAGE), threads=threads)
    runner = ModelRunner(plan_rank(model, engine, POSITIONS))
    runner.warm_up()
    return runner


def seconds(runner: ModelRunner, ids: Sequence[int], chunk: int) -> float:
    """CPU time of a prompt."""
    started = time.process_time()
    for row in rows_of(ids, chunk):
        runner.execute([row])
    return time.process_time() - started


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("decoders", __doc__)
    add_threads(parser)
    add_rounds(parser, 5)
    add_lengths(parser, 128, 512, 2048)
    parser.add_argument("--chunk-tokens", type=int, default=2048, metavar="TOKENS", help="tokens of a chunk")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    given = parser.parse_args(arguments)
    keep_freed_memory()  # as a stage does
    table = []
    for family in given.families:
        with tempfile.TemporaryDirectory() as folder, console.status(family):
            save_model(Path(folder), *FAMILIES[family])
            native, library = (make_runner(Path(folder), decoder, given.threads) for decoder in ("native", "library"))
            for length in given.lengths:
                pairs = []
                for seed in range(given.rounds):
                    ids = torch.randint(4096, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
                    pairs.append(tuple(seconds(runner, ids, given.chunk_tokens) for runner in (native, library)))
                rates = [spread([length / pair[of] for pair in pairs]) for of in (0, 1)]
                ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
                table.append((family, f"{length:,}", *rates, f"{ratio:.2f}"))
    print_table(
        f"tokens per second of CPU time, float32, {given.threads} threads: median (range) of {given.rounds} rounds",
        ("family", "tokens", "native", "library", "time, library to native"),
        table,
    )
    return 0


if __name__ == "__main__":
    run(main)
