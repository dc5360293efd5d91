"""The shape of a KV pool."""

import msgspec


class Geometry(msgspec.Struct, frozen=True):
    """One rank's KV pool: [pages, layers, 2, kv_heads, page_size, head_dim] elements of dtype, C order.

    layers are [layer_start, layer_start + layers) of the model; kv_heads likewise start at head_start.
    """

    dtype: str  # "float32", "bfloat16", "float16"
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    layer_start: int = 0
    head_start: int = 0

    @property
    def layer_end(self) -> int:
        """The layer after the last one."""
        return self.layer_start + self.layers

    @property
    def head_end(self) -> int:
        """The KV head after the last one."""
        return self.head_start + self.kv_heads

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token position over this rank's layers and heads."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many token positions."""
        return -(-tokens // self.page_size)
