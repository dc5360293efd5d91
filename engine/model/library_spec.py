"""What serving needs to know of a model that transformers' modules compute (engine/library): what each layer caches,
and how many weights it has. Pure data.
"""

from collections.abc import Iterator
from math import prod

import msgspec

from headrace.core.types.kv.geometry import KV, Component, Geometry, ceil_div
from headrace.core.types.requests.images import ImageTerms


class CachedLayer(msgspec.Struct, frozen=True):
    """What one layer caches of a token."""

    kv_heads: int
    key_width: int
    value_width: int
    expanded: bool = False
    """Attention sees keys and values that the model makes of these (latents)."""
    window: int = 0
    """Positions that are kept in a ring: this layer, and no other, attends to the last so many of them; 0: all are."""
    divided: bool = False
    """Each shard has some of the heads (--tp); else all of them cache the same."""

    def heads_of(self, shard: int, shards: int) -> range:
        """The KV heads that one shard of so many caches."""
        if not self.divided:
            return range(self.kv_heads)
        own = self.kv_heads // shards
        return range(shard * own, (shard + 1) * own)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the tensors of a pool that hold such keys and values, where it holds several."""
        ring, name = f"w{self.window}:" if self.window else "", f"{self.kv_heads}x{self.key_width}"
        if self.key_width == self.value_width:
            return (ring + name,) * 2
        return f"{ring}k{name}", f"{ring}v{name}x{self.value_width}"


class KeptState(msgspec.Struct, frozen=True):
    """What one layer keeps of a request, whatever its length."""

    kind: str
    """"conv", "recurrent" or "linear"."""
    number: int
    """Of several states of one kind in a layer."""
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the tensor of a pool that holds such states."""
        return f"{self.kind}{self.number}:{'x'.join(map(str, self.shape))}"


class Division(msgspec.Struct, frozen=True):
    """How shards divide a model (--tp), where they can."""

    sizes: tuple[int, ...]
    """Numbers that the number of shards has to divide: heads, inner widths."""
    weights: tuple[int, ...]
    """Parameters of each layer that are divided, all others are on every shard."""
    linear: tuple[int, ...]
    """Those of them that products multiply with."""
    experts: int = 0
    """Experts of a layer, at least; of which a shard has one or more. 0: it has none."""

    def takes(self, shards: int) -> bool:
        """Whether so many can divide it."""
        enough = not self.experts or shards <= self.experts
        return enough and all(size % shards == 0 for size in self.sizes)


class Encoding(msgspec.Struct, frozen=True):
    """What an encoder of images takes beside its weights, in 16 bits on a GPU: an estimate from above."""

    most_tokens: int
    """Of the largest image."""
    token_bytes: int


class LibrarySpec(msgspec.Struct, frozen=True):
    """A model as a pass on the meta device has shown it."""

    architecture: str
    """Class of transformers that computes it."""
    cached: tuple[CachedLayer | None, ...]
    """By layer; None for one that attends to what another has written."""
    weights: tuple[int, ...]
    """Number of parameters of each layer."""
    linear: tuple[int, ...]
    """Those of them that products multiply with."""
    active: tuple[int, ...]
    """The same, of experts only as many as a token goes through."""
    embedding: int
    """Parameters of the token embedding."""
    head: int
    """Those of a head that is not the embedding."""
    others: int
    """Those that every stage has: the final norm, what joins an encoder's width to the text's."""
    encoder: int
    """Those of its encoder of images; 0 where they are not served."""
    config: str
    """Digest of the configuration, as far as it says what is computed."""
    rotates_by_length: bool = False
    """Rotations depend on the longest sequence (longrope, dynamic)."""
    divisible: bool = True
    """Its layers can be divided into stages."""
    states: tuple[tuple[KeptState, ...], ...] = ()
    """By layer."""
    indexed: tuple[int, ...] = ()
    """By layer: width of the keys by which it selects positions; 0 where it does not."""
    mixers: tuple[str, ...] = ()
    """Classes of modules that have states or such keys."""
    uncalled: tuple[str, ...] = ()
    """Names of nn.Linear modules whose weights others multiply with."""
    images: ImageTerms | None = None
    """How it takes images; None where they are not served."""
    encoding: Encoding | None = None
    """What an image takes while it is encoded; None as there."""
    no_images: str = ""
    """Why they are not."""
    division: Division | None = None
    """How shards divide it; None where they cannot."""
    undivided: str = ""
    """Why they cannot."""

    @property
    def has_rings(self) -> bool:
        """Some layers have a window that can be kept in a ring."""
        return any(each is not None and each.window for each in self.cached)

    def without_rings(self) -> "LibrarySpec":
        """The same with all positions in pages (--windows keep)."""
        kept = (None if each is None else msgspec.structs.replace(each, window=0) for each in self.cached)
        return msgspec.structs.replace(self, cached=tuple(kept))

    def weight_count(self, layers: range, *, tied: bool, shards: int = 1) -> int:
        """Parameters of a shard of a stage with these layers. tied: the head is the embedding."""
        first, last = layers.start == 0, layers.stop == len(self.weights)
        ends = self.embedding * (first or (last and tied)) + self.encoder * first + self.head * last
        divided = self.division.weights if self.division is not None else None
        return _of_shard(self.weights, divided, layers, shards) + ends + self.others

    def linear_count(self, layers: range, shards: int = 1) -> int:
        """Those of the layers' parameters that products multiply with."""
        return _of_shard(self.linear, self.division.linear if self.division is not None else None, layers, shards)

    @property
    def stateful(self) -> bool:
        """Modules keep states of requests."""
        return any(self.states)

    @property
    def uniform(self) -> bool:
        """All layers cache keys and values of one shape: the pool has them as that of other models."""
        first = self.cached[0]
        if first is None or first.window or first.key_width != first.value_width:
            return False
        return set(self.cached) == {first}

    def place(self, layer: int, first: int) -> tuple[str, str, int]:
        """Where a layer's keys and values are in the pool of a stage whose first layer is this: names of two tensors,
        and the layer's number there. Raises ValueError for one that caches nothing."""
        cached = self.cached[layer]
        if cached is None:
            raise ValueError(f"layer {layer} caches nothing of its own")
        if self.uniform:
            return KV, KV, layer - first
        return *cached.names, self.cached[first:layer].count(cached)

    def state_place(self, layer: int, state: KeptState, first: int) -> int:
        """The number of a layer with this state in the pool of a stage whose first layer is this."""
        return sum(state in each for each in self.states[first:layer])

    def index_place(self, layer: int, first: int) -> tuple[str, int]:
        """The same of a layer's index keys, with the name of their tensor."""
        width = self.indexed[layer]
        return f"index{width}", self.indexed[first:layer].count(width)

    def geometry(self, dtype: str, page_size: int, layers: range, shard: int = 0, shards: int = 1) -> Geometry:
        """Shape of the pool of a stage with these layers, of one shard of so many. Tensors are in the order of the
        first layers that use them, rings last; layers of a tensor are counted among those that use it."""
        beside = (*self._index_components(dtype, layers), *self._state_components(layers))
        if self.uniform and (cached := self.cached[0]) is not None:
            heads = cached.heads_of(shard, shards)
            size = len(layers), len(heads), cached.key_width
            return Geometry(
                dtype, *size, page_size, layer_start=layers.start, head_start=heads.start, components=beside
            )
        own, before = self.cached[layers.start : layers.stop], self.cached[: layers.start]
        components: list[Component] = []
        distinct = [each for each in dict.fromkeys(own) if each is not None]
        for cached in sorted(distinct, key=lambda each: each.window > 0):
            names, widths = dict.fromkeys(cached.names), (cached.key_width, cached.value_width)
            heads = cached.heads_of(shard, shards)
            for name, width in zip(names, widths, strict=False):
                part = Component(
                    name,
                    dtype,
                    own.count(cached),
                    len(heads),
                    width,
                    planes=3 - len(names),
                    layer_start=before.count(cached),
                    head_start=heads.start,
                    per_request=cached.window > 0,
                    window=cached.window,
                )
                components.append(part)
        return Geometry(dtype, 0, 0, 0, page_size, components=(*components, *beside))

    def offered(self, pool: Geometry, shard: int) -> Geometry | None:
        """What a shard offers of its pool to peers: the first one all of it, the others what only they have."""
        if not shard:
            return pool
        divided = {name for each in self.cached if each is not None and each.divided for name in each.names}
        keys = pool.layers if self.cached[0] is not None and self.cached[0].divided else 0
        offered = msgspec.structs.replace(
            pool, layers=keys, components=tuple(part for part in pool.components if part.name in divided)
        )
        return offered if offered.tensors else None

    def _index_components(self, dtype: str, layers: range) -> Iterator[Component]:
        own = self.indexed[layers.start : layers.stop]
        for width in dict.fromkeys(each for each in own if each):
            start = self.indexed[: layers.start].count(width)
            yield Component(f"index{width}", dtype, own.count(width), 1, width, 1, start)

    def _state_components(self, layers: range) -> Iterator[Component]:
        own = [state for each in self.states[layers.start : layers.stop] for state in each]
        before = [state for each in self.states[: layers.start] for state in each]
        for state in dict.fromkeys(own):
            size, start = prod(state.shape), before.count(state)
            yield Component(state.name, "float32", own.count(state), 1, size, 1, start, per_request=True)


def _of_shard(counts: tuple[int, ...], divided: tuple[int, ...] | None, layers: range, shards: int) -> int:
    """What a shard holds of these layers, of parameters of which some are divided."""
    part = slice(layers.start, layers.stop)
    own = sum(divided[part]) if divided is not None else 0
    return sum(counts[part]) - own + ceil_div(own, shards)
