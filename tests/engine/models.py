"""Small random models of every family, and transformers' own results for them."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV3Config,
    GgufConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.core.types import packed
from headrace.core.types.kv.geometry import LEAST_SLOTS
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.layers.exchange import Exchange
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.source import resolve_source
from headrace.engine.row_sampler import FedTokens
from headrace.engine.runner import ModelRunner
from headrace.server.config.load import find_cpuinfo

CONVERTED = Path(__file__).parents[2] / ".pytest_cache" / "models"
VOCABULARY = 199
GREEDY = SamplingParams(temperature=0.0, logprobs=VOCABULARY)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large enough that positions and heads matter to the logits
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_MLA: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_QWEN3_MOE: dict[str, Any] = {
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**_SIZES, attention_bias=True),
    "llama-llama3": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama-linear": LlamaConfig(**_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "mistral": MistralConfig(**_SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**_SIZES, rope_parameters=_YARN),
    "qwen3": Qwen3Config(**_SIZES, head_dim=24),
    "deepseek-v2": DeepseekV2Config(**_MLA, q_lora_rank=20, rms_norm_eps=1e-5, topk_method="group_limited_greedy"),
    "deepseek-v2-lite": DeepseekV2Config(
        **_MLA,
        topk_method="greedy",
        q_lora_rank=None,
        attention_bias=True,
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    ),
    "deepseek-v3": DeepseekV3Config(
        **_MLA, norm_topk_prob=True, q_lora_rank=24, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(**_SIZES, **_QWEN3_MOE, norm_topk_prob=True),
    "qwen3-moe-plain": Qwen3MoeConfig(**_SIZES, **_QWEN3_MOE, norm_topk_prob=False),
}
LATENTS = tuple(name for name in CONFIGS if name.startswith("deepseek"))
ROUTER_SCALE = 2.0  # of routers' weights: with flat scores a wrong choice of experts would hardly show


def transformers_tokenizer(model: str) -> Any:
    """What transformers makes of a folder or a GGUF file."""
    path = resolve_source(model).path
    if path.suffix == ".gguf":
        return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)


@cache
def smollm2() -> PreTrainedModel:
    """The bundled model in transformers, float32."""
    path = resolve_source("smollm2").path
    converted = CONVERTED / f"smollm2-{transformers.__version__}-{path.stat().st_size}"
    if not converted.exists():  # reading GGUF takes transformers a quarter of a minute, in every process of a test run
        CONVERTED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CONVERTED) as scratch, suppress(OSError):  # another process was faster
            _from_gguf(path).save_pretrained(f"{scratch}/model")
            os.rename(f"{scratch}/model", converted)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    return model


def _from_gguf(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.config.quantization_config = None
    return model


class Saved(NamedTuple):
    folder: Path
    model: PreTrainedModel


def save_model(config: PreTrainedConfig, folder: Path, shard_size: str = "1GB") -> Saved:
    """A random model in float32; biases and norms are random too, since zeros and ones would hide mistakes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(ROUTER_SCALE)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return Saved(folder, model)


def make_runner(
    folder: Path | str,
    *,
    page_size: int = 16,
    kv_pages: int = 64,
    layers: range | None = None,
    dtype: Any = "float32",
    max_model_len: int = 256,
    cpuinfo: str = "",
    quantize: Any = "none",
    tp: Collectives = ALONE,
    mla: Any = "auto",
    decoder: Any = "auto",
    exchanges: Sequence[Exchange] = (),
    lora: Sequence[str] = (),
    windows: Any = "keep",
) -> ModelRunner:
    """A runner whose pool is full of NaN: what was not written must not be read. cpuinfo: of the CPU that this one is
    taken for, by default that of the test run."""
    plan = plan_rank(
        ModelConfig(model=str(folder), dtype=dtype, device="cpu", quantize=quantize, decoder=decoder, lora=tuple(lora)),
        EngineConfig(
            page_size=page_size,
            kv_pages=kv_pages,
            threads=1,
            cpuinfo=cpuinfo or find_cpuinfo(os.environ),
            mla=mla,
            windows=windows,
        ),
        max_model_len,
        layers=layers,
        tp=tp.size,
        shard=tp.rank,
        experts=len(exchanges[0].own) if exchanges else None,
    )
    runner = ModelRunner(plan, exchanges=exchanges, tp=tp)
    for tensor in runner.pool.tensors.values():
        tensor.fill_(float("nan"))
    return runner


class Prompt:
    """One request's tokens and pages; makes the rows that compute it."""

    def __init__(self, request: int, tokens: list[int], pages: list[int], page_size: int) -> None:
        self.request = request
        self.tokens = tokens
        self.pages = pages
        self._page_size = page_size

    def row(self, start: int, count: int, **fields: Any) -> PlanRow:
        end = start + count
        fields.setdefault("tokens", packed.pack(self.tokens[start:end]))
        if end == len(self.tokens):
            fields.setdefault("sample", GREEDY)
        pages = self.pages[: -(-end // self._page_size)]
        fields.setdefault("slot", self.request % LEAST_SLOTS)
        return PlanRow(self.request, start, count, packed.pack(pages), **fields)

    def chunks(self, size: int) -> list[PlanRow]:
        return [self.row(start, min(size, len(self.tokens) - start)) for start in range(0, len(self.tokens), size)]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
    return ids


def shuffled_pages(count: int, pool: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return ids


def run_chunks(runner: ModelRunner, rows: list[PlanRow]) -> SampledToken:
    """Execute rows one plan each; the sample of the last one."""
    samples: list[SampledToken] = []
    for row in rows:
        samples = runner.execute([row]).samples
    return samples[0]


def reported_logprobs(sampled: SampledToken) -> torch.Tensor:
    """All log-probabilities of a sample that asked for the whole vocabulary, by token id."""
    assert sampled.logprob is not None
    logprobs = torch.empty(len(sampled.logprob.top_ids))
    logprobs[list(sampled.logprob.top_ids)] = torch.tensor(sampled.logprob.top_logprobs)
    return logprobs


def pool_tokens(runner: ModelRunner, pages: list[int], count: int) -> torch.Tensor:
    """Keys and values of a request, out of its pages: [layers, 2, kv_heads, count, head_dim]."""
    gathered = runner.pool.tensor[pages].permute(1, 2, 3, 0, 4, 5)
    return gathered.flatten(3, 4)[:, :, :, :count]


def reference(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers: log-probabilities [tokens, vocabulary] and KV as pool_tokens() gives it."""
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), use_cache=True)
    layers = [(layer.keys[0], layer.values[0]) for layer in output.past_key_values.layers]
    logprobs = torch.log_softmax(output.logits[0].float(), -1)
    if model.config.model_type.startswith("deepseek"):
        return logprobs, torch.stack([slots_of(model, *layer)[None] for layer in layers])
    return logprobs, torch.stack([torch.stack(layer) for layer in layers])


def slots_of(model: PreTrainedModel, latents: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Slots of a latent pool made of transformers' cache [1, tokens, width] each: DeepSeek-V3 rotates pairs to halves
    there."""
    if model.config.model_type == "deepseek_v3":
        rotated = torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((latents, rotated), dim=-1)


def fed_tokens(tokens: Mapping[int, int]) -> FedTokens:
    """Tokens by request, as another rank has sampled them."""
    return FedTokens({request: place for place, request in enumerate(tokens)}, torch.tensor(list(tokens.values())))
