"""The shape of a KV pool: keys and values, and the components beside them."""

from typing import Annotated

import msgspec
from msgspec import Meta, field

KV = "kv"  # the name of a model's own keys and values among the tensors of a pool
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
MAX_COMPONENTS = 16
Word = Annotated[str, Meta(min_length=1, max_length=64)]


def ceil_div(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


class Component(msgspec.Struct, frozen=True):
    """One rank's part of KV of one kind: [pages, layers, planes, kv_heads, page_size, head_dim] elements of dtype, in
    the pages of the same tokens.

    planes: 2 for keys and values, 1 for a single vector such as an MLA latent. Layers (of the component's own model,
    where that is a draft model) and heads are counted from the two starts.
    """

    name: Word
    dtype: Word  # one of ITEM_BYTES; "uint8" is for bytes of any meaning
    layers: int
    kv_heads: int
    head_dim: int
    planes: int = 2
    layer_start: int = 0
    head_start: int = 0

    @property
    def layer_end(self) -> int:
        """The layer after the last one."""
        return self.layer_start + self.layers

    @property
    def head_end(self) -> int:
        """The head after the last one."""
        return self.head_start + self.kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in one layer, plane and head."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over this rank's layers and heads."""
        return self.layers * self.planes * self.kv_heads * self.slot_bytes


class Geometry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's KV pool: [pages, layers, 2, kv_heads, page_size, head_dim] elements of dtype, and its components.

    layers are [layer_start, layer_start + layers) of the model; kv_heads likewise start at head_start. layers is 0
    where a rank has components alone.
    """

    dtype: str  # "float32", "bfloat16", "float16"
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    layer_start: int = field(default_factory=int)  # a factory has msgspec write it even when it is 0
    head_start: int = field(default_factory=int)
    components: Annotated[tuple[Component, ...], Meta(max_length=MAX_COMPONENTS)] = ()

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def tensors(self) -> tuple[Component, ...]:
        """All that the pool holds: keys and values as a component named KV, unless there are none, and the others."""
        if not self.layers:
            return self.components
        size = self.layers, self.kv_heads, self.head_dim
        own = Component(KV, self.dtype, *size, layer_start=self.layer_start, head_start=self.head_start)
        return own, *self.components

    @property
    def token_bytes(self) -> int:
        """Bytes of one token position over this rank's layers and heads, components included."""
        return sum(tensor.token_bytes for tensor in self.tensors)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many token positions."""
        return ceil_div(tokens, self.page_size)
