"""Model families: what differs between them, one row each. Nothing else asks which family a model is of.

A row says how config.json is to be read and what files have beside it; the arithmetic follows from the switches of
ModelSpec. To add a family, add its row, and a small model of it to tests/engine/models.py.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from headrace.core.types.errors import UnknownModel
from headrace.engine.model.config_fields import NAME, NAMES, Fields
from headrace.engine.model.moe_spec import (
    MoeSpec,
    read_deepseek_v2_moe,
    read_deepseek_v3_moe,
    read_mixtral_moe,
    read_qwen3_moe,
)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One family of models."""

    model_type: str
    """Of config.json; the architecture of GGUF files."""
    architecture: str
    """First of the architectures of config.json."""
    head_dim: int | None = None
    """Where config.json has none; None divides the hidden size among the heads."""
    norm_eps: float = 1e-6
    """Where config.json has none."""
    qkv_bias: Literal["configured", "always", "never"] = "configured"
    """Query, key and value projections have biases: as attention_bias says, or whatever it says."""
    output_bias: bool = False
    """Where attention_bias is true the output projection has a bias, too."""
    qk_norm: bool = False
    """RMSNorm on each query and key head."""
    window: Literal["none", "sliding_window", "use_sliding_window"] = "none"
    """Sliding attention: none, as sliding_window says, or the same where use_sliding_window is true."""
    default_window: int | None = None
    """Of transformers, where config.json has no sliding_window; null in it is none."""
    latent: bool = False
    """Multi-head latent attention (mla_spec.py)."""
    read_moe: Callable[[Fields], MoeSpec | None] | None = None
    """Reads the layers of experts; None: the family has none."""
    gguf: bool = False
    """GGUF files of it are read."""
    gguf_pairs: bool = False
    """They have the rows of each query and key head for pairwise rotation."""
    halved_keys: bool = False
    """transformers keeps the rotated part of latent keys in halves, where the pool has pairs."""


FAMILIES: tuple[Family, ...] = (
    Family(model_type="llama", architecture="LlamaForCausalLM", output_bias=True, gguf=True, gguf_pairs=True),
    Family(model_type="mistral", architecture="MistralForCausalLM", window="sliding_window", default_window=4096),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        qkv_bias="always",
        window="use_sliding_window",
        default_window=4096,
        gguf=True,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        head_dim=128,
        output_bias=True,
        qk_norm=True,
        window="use_sliding_window",
        default_window=4096,
        gguf=True,
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        output_bias=True,
        qk_norm=True,
        window="use_sliding_window",
        default_window=4096,
        read_moe=read_qwen3_moe,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        norm_eps=1e-5,
        qkv_bias="never",
        window="sliding_window",
        read_moe=read_mixtral_moe,
    ),
    Family(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        output_bias=True,
        latent=True,
        read_moe=read_deepseek_v2_moe,
    ),
    Family(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        output_bias=True,
        latent=True,
        read_moe=read_deepseek_v3_moe,
        halved_keys=True,
    ),
)
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}


def family_of(config: Fields) -> Family:
    """The family of a parsed config.json: by its architectures, or by its model_type where it names none. Raises
    UnknownModel for one that is not here."""
    supported = f"supported are {', '.join(BY_ARCHITECTURE)}"
    if architectures := config.get("architectures", NAMES, []):
        if architectures[0] not in BY_ARCHITECTURE:
            raise UnknownModel(f"architecture {architectures[0]} is not supported; {supported}")
        return BY_ARCHITECTURE[architectures[0]]
    model_type = config.get("model_type", NAME)
    if model_type not in BY_MODEL_TYPE:
        raise UnknownModel(f"model_type {model_type} is not supported; {supported}")
    return BY_MODEL_TYPE[model_type]
