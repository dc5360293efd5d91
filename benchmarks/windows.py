"""KV of one request with windows kept (--windows keep) and freed: MiB that a prefill server hands over.

`python -m benchmarks.windows`. Published configurations in bfloat16; nothing is computed.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from benchmarks.arguments import make_parser
from benchmarks.report import print_table, run
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.library.spec import library_spec
from headrace.engine.model.source import resolve_source

LENGTHS = (2048, 8192, 32768, 131072)
GEMMA3: dict[str, Any] = {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "vocab_size": 262208,
    "max_position_embeddings": 131072,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880,
    "max_position_embeddings": 131072,
}  # fmt: skip
MODELS = {"Gemma 3 27B": ("gemma3_text", GEMMA3), "gpt-oss-120b": ("gpt_oss", GPT_OSS)}


def main(arguments: Sequence[str]) -> int:
    """Print a row for each model and length. Returns the exit status."""
    make_parser("windows", __doc__).parse_args(arguments)
    rows = []
    for name, (kind, fields) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            AutoConfig.for_model(kind, **fields).save_pretrained(folder)
            library = library_spec(resolve_source(folder)).library
        assert library is not None
        layers = range(len(library.cached))
        kept, freed = (each.geometry("bfloat16", 16, layers) for each in (library.without_rings(), library))
        for length in LENGTHS:
            whole, part = (_sent(geometry, length) / (1 << 20) for geometry in (kept, freed))
            rows.append((name, f"{length:,}", f"{whole:,.0f}", f"{part:,.0f}", f"{whole / part:.2f}"))
    print_table("KV of a request", ("model", "tokens", "kept (MiB)", "freed (MiB)", "ratio"), rows)
    return 0


def _sent(geometry: Geometry, length: int) -> int:
    return length * geometry.token_bytes + geometry.states_sent(length)


if __name__ == "__main__":
    run(main)
