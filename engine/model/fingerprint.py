"""Model fingerprint: equal for the same model in any dtype, on any stage and in any file format, but not in 8 bits."""

import msgspec
import torch
import xxhash
from torch import Tensor

from headrace.core.config import Quantize
from headrace.engine.model.checkpoint import GgufTensors, SafetensorsCheckpoint, Tensors
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.rope import inverse_frequencies

SAMPLED_ROWS = 8  # of each sampled matrix
SAMPLED_TENSORS = 8  # of a model that is known by its files alone


def fingerprint(spec: ModelSpec, checkpoint: Tensors, quantize: Quantize = "none", length: int = 0) -> str:
    """Hash of the sizes, the rotary frequencies and sampled rows of a few tensors, rounded to bfloat16: xxh3, 128 bits,
    hex.

    Independent of how the model is stored (tied or not, notation of the rope scaling, dtype, position limit). A
    quantised model has another one, so that its KV is not mixed with that of the model itself; one that transformers'
    modules compute has one by its configuration and its files. length: of the longest sequence, which matters where
    rotations depend on it. Raises ConfigError for a
    missing or misshapen tensor.
    """
    digest = xxhash.xxh3_128()
    if quantize != "none":
        digest.update(quantize.encode())
    if spec.library is not None:
        assert isinstance(checkpoint, SafetensorsCheckpoint | GgufTensors)
        digest.update(spec.library.config.encode())
        if spec.library.rotates_by_length:
            digest.update(str(length).encode())
        names = sorted(checkpoint.names)
        for at in torch.linspace(0, len(names) - 1, min(SAMPLED_TENSORS, len(names))).long().tolist():
            shape = checkpoint.shape(names[at])
            digest.update(names[at].encode())
            digest.update(_rounded(_sampled(checkpoint, names[at], shape)))
        return digest.hexdigest()
    digest.update(msgspec.msgpack.encode(_sizes(spec)))
    if spec.moe is not None:
        digest.update(msgspec.msgpack.encode(_moe_sizes(spec.moe)))
    frequencies, scale = inverse_frequencies(spec.rope, spec.rotary_dim)
    digest.update(_rounded(frequencies))
    digest.update(_rounded(torch.tensor([scale])))
    embedding = (spec.vocab_size, spec.hidden_size)
    head = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", embedding),
        (head, embedding),
        ("model.norm.weight", (spec.hidden_size,)),
    ]
    query, inputs = "q_proj", spec.hidden_size
    if spec.mla and spec.mla.query_rank:
        query, inputs = "q_b_proj", spec.mla.query_rank
    for layer in (0, spec.layers - 1):
        prefix = f"model.layers.{layer}"
        tensors.append((f"{prefix}.input_layernorm.weight", (spec.hidden_size,)))
        tensors.append((f"{prefix}.self_attn.{query}.weight", (spec.heads * spec.head_dim, inputs)))
    tensors += _routers(spec)
    for name, shape in tensors:
        digest.update(_rounded(_sampled(checkpoint, name, shape)))
    return digest.hexdigest()


def _sampled(checkpoint: Tensors, name: str, shape: tuple[int, ...]) -> Tensor:
    """Some rows of a matrix, or a vector."""
    if len(shape) < 2:
        return checkpoint.read(name, shape)
    return checkpoint.read(name, shape, torch.linspace(0, shape[0] - 1, min(SAMPLED_ROWS, shape[0])).long().tolist())


def _routers(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the routers of the first and the last MoE layer."""
    layers = [layer for layer, kind in enumerate(spec.layer_kinds) if kind == "moe"]
    if spec.moe is None or not layers:
        return []
    shape = (spec.moe.experts, spec.hidden_size)
    return [(f"model.layers.{layer}.{spec.moe.module}.gate.weight", shape) for layer in (layers[0], layers[-1])]


def _moe_sizes(moe: MoeSpec) -> list[int | str]:
    return [
        moe.experts,
        moe.top_k,
        moe.intermediate_size,
        "".join(kind[0] for kind in moe.layer_kinds),
        moe.shared_size,
        moe.scores,
        int(moe.choice_bias),
        moe.groups,
        moe.top_groups,
        moe.group_score,
        int(moe.normalized),
        f"{moe.scaling:.4g}",
    ]


def _sizes(spec: ModelSpec) -> list[int | str]:
    mla = spec.mla
    latent: list[int | str] = []
    if mla:
        latent = [mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.value_dim, mla.query_rank, f"{mla.scale:.4g}"]
    return [
        spec.vocab_size,
        spec.hidden_size,
        spec.intermediate_size,
        spec.layers,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        f"{spec.norm_eps:.4g}",
        int(spec.qkv_bias),
        int(spec.output_bias),
        int(spec.qk_norm),
        *latent,
    ]


def _rounded(values: Tensor) -> bytes:
    rounded = values.float().to(torch.bfloat16) + 0.0  # adding zero turns -0 into 0
    return rounded.contiguous().view(torch.int16).numpy().tobytes()
