"""ModelSpec of a GGUF file that our own layers compute."""

from math import inf

from headrace.core.types.errors import ConfigError, UnknownModel
from headrace.engine.model.config import ModelSpec, RopeKind, RopeSpec
from headrace.engine.model.config_fields import ABOVE_ONE, COUNT, LAYERS, NAME, POSITIVE, SIZE, Fields
from headrace.engine.model.families import FAMILIES
from headrace.engine.model.gguf_config import Keys
from headrace.engine.model.gguf_file import ROPE_DIVISORS, GgufFile


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """ModelSpec of a GGUF file. Raises ConfigError for an architecture that the engine cannot run, and for a key that
    is missing or has a value of the wrong type or range."""
    architecture = Fields(file.name, file.metadata).get("general.architecture", NAME)
    known = [family.model_type for family in FAMILIES if family.gguf]
    if architecture not in known:
        raise UnknownModel(f"our own layers compute GGUF files of {', '.join(known)}, this is {architecture!r}")
    keys = Keys(file, architecture)
    if keys.get("expert_count", COUNT, 0):
        raise UnknownModel("our own layers compute GGUF files of models without experts, this one has some")
    hidden, heads = keys.get("embedding_length", SIZE), keys.get("attention.head_count", SIZE)
    head_dim = keys.get("attention.key_length", SIZE, hidden // heads)
    if (rotated := keys.get("rope.dimension_count", COUNT, head_dim)) != head_dim:
        raise ConfigError(f"rope.dimension_count {rotated} must equal the head size {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError("tensor token_embd.weight is missing in the GGUF file")
    epsilon = keys.get("attention.layer_norm_rms_epsilon", POSITIVE)
    return ModelSpec(
        family=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.get("feed_forward_length", SIZE),
        layers=keys.get("block_count", LAYERS),
        heads=heads,
        kv_heads=keys.get("attention.head_count_kv", SIZE, heads),
        head_dim=head_dim,
        norm_eps=float(f"{epsilon:.6g}"),  # stored as float32: 1e-05 reads 9.99…e-06
        rope=_rope(file, keys, head_dim),
        max_positions=keys.get("context_length", SIZE),
        sliding_window=keys.optional("attention.sliding_window", COUNT),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _rope(file: GgufFile, keys: Keys, head_dim: int) -> RopeSpec:
    theta = keys.get("rope.freq_base", ABOVE_ONE, 10000.0)
    if ROPE_DIVISORS in file.tensors:  # llama.cpp stores Llama 3 scaling as divisors
        divisors = tuple(float(value) for value in file.read(ROPE_DIVISORS).reshape(-1))
        if len(divisors) * 2 != head_dim or not all(0 < value < inf for value in divisors):
            raise ConfigError(f"{file.name}: tensor {ROPE_DIVISORS} must hold {head_dim // 2} numbers above 0")
        return RopeSpec(kind="divisors", theta=theta, divisors=divisors)
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn"}
    scaling = keys.get("rope.scaling.type", NAME, "none")
    if scaling not in kinds:
        raise ConfigError(f"GGUF rope.scaling.type {scaling!r} is not supported; supported are {', '.join(kinds)}")
    positions = keys.get("context_length", SIZE)
    return RopeSpec(
        kind=kinds[scaling],
        theta=theta,
        factor=keys.get("rope.scaling.factor", POSITIVE, 1.0),
        original_positions=keys.get("rope.scaling.original_context_length", SIZE, positions),
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", POSITIVE, 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", POSITIVE, 1.0),
    )
