"""Sizes of multi-head latent attention (MLA, arXiv 2405.04434), as DeepSeek-V2 and -V3 have it."""

import math

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Component, Geometry, ceil_div

HEAD_STEP = 8  # elements; flash kernels take heads of multiples of it
LATENT = "latent"  # name of the component in the KV pool
INNER_NORM_EPS = 1e-6  # of the norms of both latents, whatever rms_norm_eps says


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What attention caches for a token is one latent for all heads, and one rotated key."""

    kv_rank: int
    """kv_lora_rank: width of the latent that keys and values are made of."""
    nope_dim: int
    """qk_nope_head_dim: width of a query and key head that is not rotated."""
    rope_dim: int
    """qk_rope_head_dim: width that is rotated; the key's is shared by all heads."""
    value_dim: int
    """v_head_dim: width of a value head."""
    query_rank: int = 0
    """q_lora_rank: width of the latent that queries are made of; 0: they are made of the hidden state."""
    score_factor: float = 1.0
    """What scores are multiplied by beside 1 / sqrt(nope_dim + rope_dim): with YaRN and mscale_all_dim, the square of
    its magnitude."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that are none."""
        sizes = {
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"the model says {name} {size}; it must be at least 1")
        if self.rope_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.rope_dim}; rotary embedding needs an even one")

    @property
    def query_dim(self) -> int:
        """Width of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def slot_dim(self) -> int:
        """Elements that the pool holds of a token in a layer: the latent, then the rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def wide_dim(self) -> int:
        """Width of heads of keys and values as flash kernels take them: the same, in steps of 16 bytes."""
        return ceil_div(max(self.query_dim, self.value_dim), HEAD_STEP) * HEAD_STEP

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.score_factor / math.sqrt(self.query_dim)

    def geometry(self, dtype: str, page_size: int, layers: range) -> Geometry:
        """KV pool of these layers: a latent in place of keys and values."""
        latent = Component(
            LATENT, dtype, len(layers), kv_heads=1, head_dim=self.slot_dim, planes=1, layer_start=layers.start
        )
        return Geometry(dtype, layers=0, kv_heads=0, head_dim=0, page_size=page_size, components=(latent,))

    def up_weights(self, heads: int) -> int:
        """Weights that make keys and values of the latent (kv_b_proj)."""
        return self.kv_rank * heads * (self.nope_dim + self.value_dim)

    def widening(self, heads: int) -> int:
        """Zeros and ones beside them, where one product makes keys and values of wide_dim of what the pool holds."""
        return heads * 2 * self.wide_dim * self.slot_dim - self.up_weights(heads)

    def weights(self, hidden: int, heads: int) -> int:
        """Weights of the linear layers of one attention block."""
        queries = heads * self.query_dim
        query = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        return query + hidden * self.slot_dim + self.up_weights(heads) + heads * self.value_dim * hidden

    def norms(self) -> int:
        """Weights of the norms of one attention block."""
        return self.query_rank + self.kv_rank

    def biases(self, hidden: int) -> int:
        """Elements of the biases of one attention block that has them."""
        return self.query_rank + self.slot_dim + hidden
