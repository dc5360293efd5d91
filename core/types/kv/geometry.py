"""Shape of a KV pool: keys and values, and further components such as a draft model's KV."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, field

KV = "kv"  # name of the model's own keys and values among the tensors of a pool
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
MAX_COMPONENTS = 16
Word = Annotated[str, Meta(min_length=1, max_length=64)]


def ceil_div(count: int, size: int) -> int:
    """Parts of this size that hold so many items: count / size, rounded up."""
    return -(-count // size)


def pages_spanned(start: int, end: int, page_size: int) -> int:
    """Pages that positions [start, end) lie in, where page n begins at position n * page_size; end > start."""
    return ceil_div(end, page_size) - start // page_size


class Component(msgspec.Struct, frozen=True):
    """One rank's part of one tensor of a KV pool: [pages, layers, planes, kv_heads, page_size, head_dim] of dtype.

    A page holds the same tokens in every component.
    """

    name: Word
    dtype: Word
    """One of ITEM_BYTES; "uint8" for bytes of any meaning."""
    layers: int
    kv_heads: int
    head_dim: int
    planes: int = 2
    """Vectors per token: 2 for keys and values, 1 for a single one such as an MLA latent."""
    layer_start: int = 0
    """First layer of this rank, in the component's own model (which may be a draft model)."""
    head_start: int = 0
    """First KV head of this rank."""

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
    """One rank's KV pool: [pages, layers, 2, kv_heads, page_size, head_dim] elements of dtype, and its components."""

    dtype: str
    """Either "float32", "bfloat16" or "float16"."""
    layers: int
    """0 for a rank that has components only."""
    kv_heads: int
    head_dim: int
    page_size: int
    """Tokens per page."""
    layer_start: int = field(default_factory=int)  # a factory has msgspec write it even when it is 0
    """First layer of this rank."""
    head_start: int = field(default_factory=int)
    """First KV head of this rank."""
    components: Annotated[tuple[Component, ...], Meta(max_length=MAX_COMPONENTS)] = ()
    """What the pages hold besides keys and values."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def tensors(self) -> tuple[Component, ...]:
        """All tensors of the pool: keys and values as a component named KV, if there are any, then the components."""
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
        """Bytes of one page over this rank's layers and heads, components included."""
        return self.token_bytes * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many token positions."""
        return ceil_div(tokens, self.page_size)


class CacheShape(msgspec.Struct, frozen=True):
    """Keys and values of a whole model, over all its ranks."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int


def cache_shape(ranks: Iterable[Geometry]) -> CacheShape | None:
    """Shape of the cache of a model's ranks; None if any holds other components than K and V, or if there is none."""
    parts = [part for rank in ranks for part in rank.tensors]
    if not parts or any(part.name != KV for part in parts):
        return None
    layers, heads = max(part.layer_end for part in parts), max(part.head_end for part in parts)
    return CacheShape(parts[0].dtype, layers, heads, parts[0].head_dim)
