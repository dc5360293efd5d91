"""What benchmarks count, and how they end."""

from collections.abc import Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.report import run
from benchmarks.utilisation import chunk_flops
from headrace.core.types.errors import ConfigError
from headrace.engine.model.source import load_spec, resolve_source
from tests.engine.models import CONFIGS, save_model


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek-v2"])
def test_flops_are_those_that_torch_counts(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of transformers, which multiplies the whole square of queries and keys."""
    tokens, folder = 40, tmp_path_factory.mktemp(name)
    spec = load_spec(resolve_source(str(save_model(CONFIGS[name], folder).folder)))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(1, tokens, dtype=torch.int64), logits_to_keep=1)
    beyond_the_diagonal = tokens * (tokens - 1) // 2
    widths = spec.mla.query_dim + spec.mla.value_dim if spec.mla else 2 * spec.head_dim
    attended = 2 * spec.layers * spec.heads * widths
    assert chunk_flops(spec, tokens) == counter.get_total_flops() - attended * beyond_the_diagonal


@pytest.mark.parametrize(
    ("raised", "status"), [(ConfigError("no such model"), "no such model"), (KeyboardInterrupt(), 130)]
)
def test_mistakes_and_interrupts_end_without_a_traceback(raised: BaseException, status: object) -> None:
    def main(_arguments: Sequence[str]) -> int:
        raise raised

    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == status or str(ended.value.code).endswith(f": {status}")
