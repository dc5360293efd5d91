"""Which tensors a model consists of, by its specification: all that are read, and what may lie beside them unread."""

import re
from collections.abc import Iterable, Mapping

from headrace.core.types.errors import ConfigError, first_of
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.model.moe_spec import MoeSpec

Shapes = Mapping[str, tuple[int, ...]]
HEAD = "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")  # of safetensors
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
# Left in files by older versions of transformers: buffers that follow from the configuration.
_BUFFERS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_SHOWN = 3  # names in an error message


def model_tensors(spec: ModelSpec) -> Shapes:
    """Shapes of all tensors of a model, by Hugging Face name."""
    table = (spec.vocab_size, spec.hidden_size)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (spec.hidden_size,),
        **({} if spec.tied else {HEAD: table}),
    }
    attention = _grouped(spec) if spec.mla is None else _latent(spec, spec.mla)
    dense = _mlp("mlp", spec.intermediate_size, spec.hidden_size)
    experts = dense if spec.moe is None else _experts(spec.moe, spec.hidden_size)
    for layer, kind in enumerate(spec.layer_kinds):
        for name, shape in (*attention.items(), *(experts if kind == "moe" else dense).items()):
            found[f"model.layers.{layer}.{name}"] = shape
    return found


def refuse_unread(spec: ModelSpec, names: Iterable[str], where: str) -> None:
    """Raises ConfigError for tensors that the model does not consist of, which would have no effect: such as scales of
    quantised weights, biases, or layers that the configuration does not know.

    Three kinds may be there unread: rotary buffers, which follow from the configuration; an output head where the
    configuration says that it is the embedding; layers behind the last one that predict further tokens (DeepSeek-V3's
    multi-token prediction, told by the configuration or by their eh_proj).
    """
    known, stored = model_tensors(spec), set(names)
    unread = [
        name
        for name in sorted(stored)
        if name not in known
        and not (spec.tied and name == HEAD)
        and not _BUFFERS.fullmatch(name)
        and not _predicts_further(spec, name, stored)
    ]
    if unread:
        named = first_of([f"{name!r:.100}" for name in unread], _SHOWN)
        raise ConfigError(f"{where} has tensors that a {spec.family} model of this configuration lacks: {named}")


def _predicts_further(spec: ModelSpec, name: str, stored: set[str]) -> bool:
    found = _LAYER.match(name)
    if found is None or (behind := int(found[1]) - spec.layers) < 0:
        return False
    return behind < spec.further_layers or f"{found[0]}eh_proj.weight" in stored


def _grouped(spec: ModelSpec) -> Shapes:
    hidden, query, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (hidden, query), **_norms(hidden)}
    for name, rows in (("q", query), ("k", kv), ("v", kv)):
        found[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if spec.qkv_bias:
            found[f"self_attn.{name}_proj.bias"] = (rows,)
    if spec.output_bias:
        found["self_attn.o_proj.bias"] = (hidden,)
    if spec.qk_norm:
        found |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (spec.head_dim,))
    return found


def _latent(spec: ModelSpec, mla: MlaSpec) -> Shapes:
    hidden, queries = spec.hidden_size, spec.heads * mla.query_dim
    found: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (mla.slot_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_rank,),
        "kv_b_proj.weight": (spec.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank),
        "o_proj.weight": (hidden, spec.heads * mla.value_dim),
    }
    if mla.query_rank:
        found |= {
            "q_a_proj.weight": (mla.query_rank, hidden),
            "q_a_layernorm.weight": (mla.query_rank,),
            "q_b_proj.weight": (queries, mla.query_rank),
        }
    else:
        found["q_proj.weight"] = (queries, hidden)
    if spec.output_bias:
        found |= {"kv_a_proj_with_mqa.bias": (mla.slot_dim,), "o_proj.bias": (hidden,)}
        if mla.query_rank:
            found["q_a_proj.bias"] = (mla.query_rank,)
    return {f"self_attn.{name}": shape for name, shape in found.items()} | _norms(hidden)


def _experts(moe: MoeSpec, hidden: int) -> Shapes:
    found: dict[str, tuple[int, ...]] = {f"{moe.module}.gate.weight": (moe.experts, hidden)}
    if moe.choice_bias:
        found[f"{moe.module}.gate.e_score_correction_bias"] = (moe.experts,)
    if moe.shared_size:
        found |= _mlp(f"{moe.module}.shared_experts", moe.shared_size, hidden)
    for expert in range(moe.experts):
        found |= _mlp(f"{moe.module}.experts.{expert}", moe.intermediate_size, hidden, moe.projections)
    return found


def _mlp(
    module: str, inner: int, hidden: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return {f"{module}.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def _norms(hidden: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,))
