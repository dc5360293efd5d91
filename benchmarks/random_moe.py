"""A random Qwen3-MoE for benchmarks of experts that are divided among ranks."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from headrace.engine.model.config import ModelSpec
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.model.stub import stub_tokenizer

VOCABULARY = 2048


def add_sizes(parser: ArgumentParser) -> None:
    """The flags of save_moe()."""
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers, all with experts")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="hidden size; an expert's is half of it")
    parser.add_argument("--experts", type=int, default=32, metavar="N", help="experts of a layer")
    parser.add_argument("--top-k", type=int, default=4, metavar="N", help="experts that a token goes through")


def save_moe(folder: Path, given: Namespace) -> tuple[ModelSpec, MoeSpec]:
    """Write a model with random float32 weights, and a tokenizer of bytes. Returns its sizes."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=given.hidden,
        intermediate_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=given.hidden // 128,
        head_dim=64,
        max_position_embeddings=8192,
        num_experts=given.experts,
        num_experts_per_tok=given.top_k,
        moe_intermediate_size=given.hidden // 2,
        norm_topk_prob=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = stub_tokenizer(f"stub:vocab={VOCABULARY}")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    spec = load_spec(resolve_source(str(folder)))
    assert spec.moe is not None
    return spec, spec.moe
