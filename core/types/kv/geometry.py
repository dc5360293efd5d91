"""Shape of a KV pool: keys and values, further components such as a draft model's KV, and states of requests."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, field

KV = "kv"  # name of the model's own keys and values among the tensors of a pool
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
MAX_COMPONENTS = 16
STATE_TOKENS = 1024  # token positions of a pool for each slot of a state, at least
WINDOW_SHARE = 4  # and positions for each of those that a slot has of a window, so that a window saves as much
LEAST_SLOTS = 8
RING_STEP = 64  # a ring is whole steps, one more than its window: so many tokens are written to it at a time
Word = Annotated[str, Meta(min_length=1, max_length=64)]


def ceil_div(count: int, size: int) -> int:
    """Parts of this size that hold so many items: count / size, rounded up."""
    return -(-count // size)


def ring_positions(window: int) -> int:
    """Positions that a slot has for a window of so many: position p is in place p % ring_positions."""
    return ceil_div(window, RING_STEP) * RING_STEP + RING_STEP


def pages_spanned(start: int, end: int, page_size: int) -> int:
    """Pages that positions [start, end) lie in, where page n begins at position n * page_size; end > start."""
    return ceil_div(end, page_size) - start // page_size


class Component(msgspec.Struct, frozen=True):
    """One rank's part of one tensor of a KV pool: [pages, layers, planes, kv_heads, page_size, head_dim] of dtype.

    A page holds the same tokens in every component. What is kept of a request whatever its length (a recurrent or
    convolution state) has slots for requests in the place of pages: [slots, layers, planes, kv_heads, 1, head_dim]; of
    layers with a window, which attend to the last tokens only, that is a ring [.., ring_positions(window), head_dim].
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
    per_request: bool = False
    """It is a state of a request: layers are those that keep one."""
    window: int = 0
    """Of a state that is a ring: positions of a request that are needed of it, the last ones."""

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
        """Bytes of one token, or of a state of one request, over this rank's layers and heads."""
        return self.layers * self.planes * self.kv_heads * self.slot_bytes

    @property
    def positions(self) -> int:
        """Of a state: places in a slot."""
        return ring_positions(self.window) if self.window else 1

    def sent(self, end: int) -> int:
        """Of a state behind so many tokens: places that go with it in a handoff."""
        return min(self.window, end) if self.window else 1


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
        return sum(tensor.token_bytes for tensor in self.tensors if not tensor.per_request)

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot for the states of one request over this rank's layers; 0 where it keeps none."""
        return sum(tensor.token_bytes * tensor.positions for tensor in self._states)

    def states_sent(self, end: int) -> int:
        """Bytes of the states of a request behind so many tokens, in a handoff."""
        return sum(tensor.token_bytes * tensor.sent(end) for tensor in self._states)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over this rank's layers and heads, components included."""
        return self.token_bytes * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many token positions."""
        return ceil_div(tokens, self.page_size)

    def slots_for(self, pages: int) -> int:
        """Slots for states beside so many pages; 0 where requests keep none."""
        return max(LEAST_SLOTS, pages * self.page_size // self._tokens_per_slot) if self.state_bytes else 0

    def pool_bytes(self, pages: int) -> int:
        """Bytes of a pool of so many pages, with the slots beside them."""
        return pages * self.page_bytes + self.slots_for(pages) * self.state_bytes

    def pages_within(self, room: int) -> int:
        """Pages of the largest pool that takes no more than so many bytes."""
        state, page = self.state_bytes, self.page_bytes
        if not state:
            return max(0, room // page)
        tokens = self._tokens_per_slot
        most = max(0, room) * tokens // (page * tokens + state * self.page_size) + ceil_div(tokens, self.page_size)
        return bisect_right(range(1, most + 1), room, key=self.pool_bytes)

    def extent(self, tensor: Component, pages: int, slots: int) -> tuple[int, int]:
        """Of one of the tensors: how many pages or slots it has in a pool, and token positions in each of them."""
        return (slots, tensor.positions) if tensor.per_request else (pages, self.page_size)

    @property
    def _states(self) -> tuple[Component, ...]:
        return tuple(tensor for tensor in self.components if tensor.per_request)

    @property
    def _tokens_per_slot(self) -> int:
        return max(STATE_TOKENS, WINDOW_SHARE * max((state.positions for state in self._states), default=1))


class CacheShape(msgspec.Struct, frozen=True):
    """Keys and values of a whole model, over all its ranks."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int


def whole_tensors(ranks: Iterable[Geometry]) -> tuple[Component, ...]:
    """What pages hold of a whole model: the paged tensors of its ranks, joined by name."""
    whole: dict[str, Component] = {}
    for part in (part for rank in ranks for part in rank.tensors if not part.per_request):
        known = whole.get(part.name, part)
        layers, heads = max(known.layer_end, part.layer_end), max(known.head_end, part.head_end)
        whole[part.name] = msgspec.structs.replace(part, layers=layers, kv_heads=heads, layer_start=0, head_start=0)
    return tuple(whole[name] for name in sorted(whole))


def cache_shape(ranks: Iterable[Geometry]) -> CacheShape | None:
    """Shape of the cache of a model's ranks; None if any holds other components than K and V, or if there is none."""
    parts = [part for rank in ranks for part in rank.tensors]
    if not parts or any(part.name != KV for part in parts):
        return None
    layers, heads = max(part.layer_end for part in parts), max(part.head_end for part in parts)
    return CacheShape(parts[0].dtype, layers, heads, parts[0].head_dim)
