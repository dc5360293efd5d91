"""Modules that keep something of a request besides keys and values: recurrent and convolution states, index keys.

They run request by request. A state is in the request's slot of the pool between passes, in float32 whatever the
dtype of computation: rounding it at the end of each chunk would add up.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.attention.slots import LayerSlot, SlotPass
from headrace.engine.kv.pool import KVPool
from headrace.engine.library.cache import CacheOwner, RowsCache
from headrace.engine.library.hooks import Mask, current
from headrace.engine.model.library_spec import LibrarySpec

Key = tuple[int, str, int]
"""Layer of the model, and kind and number of a state, as KeptState."""


class StateStore:
    """Where the states and index keys of a stage's layers are in its pool."""

    def __init__(self, spec: LibrarySpec, layers: range) -> None:
        self._spec = spec
        self._layers = layers
        self._pool: KVPool | None = None
        self._views: dict[Key, Tensor] = {}
        self.dtypes: dict[Key, torch.dtype] = {}
        """In which modules compute with a state, since it was first kept: at the latest in the trial at loading."""

    def attach(self, pool: KVPool) -> None:
        """Where the states are; called once."""
        self._pool = pool
        for layer in self._layers:
            for state in self._spec.states[layer]:
                rows = pool.tensors[state.name][:, self._spec.state_place(layer, state, self._layers.start)]
                self._views[layer, state.kind, state.number] = rows.view(pool.state_slots, 1, *state.shape)

    def view(self, key: Key, slot: int) -> Tensor:
        """A state of a request in the pool [1, ...]. Raises IndexError for a slot outside the pool."""
        views = self._views[key]
        if not 0 <= slot < len(views):
            raise IndexError(f"slot {slot} is outside the {len(views)} slots for states")
        return views[slot]

    def rows(self, span: AttentionSpan) -> SlotPass:
        """What is kept for each of a request's positions."""
        assert self._pool is not None, "attach() comes first"
        return SlotPass(self._pool, None, [span])

    def index_slot(self, layer: int) -> LayerSlot:
        """Where the index keys of a layer are."""
        name, number = self._spec.index_place(layer, self._layers.start)
        return LayerSlot(name, name, number)


class RequestStates(CacheOwner):
    """The states of one request in a pass over some of its tokens."""

    def __init__(self, store: StateStore, span: AttentionSpan) -> None:
        """span: the tokens; a request begins without states at position 0."""
        self._store = store
        self._span = span
        self._held: dict[Key, Tensor] = {}
        self.offsets = span.start

    def state(self, layer: int, kind: str, number: int) -> Tensor | None:
        """See CacheOwner."""
        key = layer, kind, number
        if key not in self._held:
            if not self._span.start:
                return None
            view, to = self._store.view(key, self._span.slot), self._store.dtypes.get(key)
            if self._span.resume >= 0:  # which stays as it is, whatever a module changes in place
                view = self._store.view(key, self._span.resume).clone()
            self._held[key] = view.to(to or view.dtype)
        return self._held[key]

    def keep(self, layer: int, kind: str, number: int, value: Tensor) -> Tensor:
        """See CacheOwner."""
        key = layer, kind, number
        self._store.dtypes[key] = value.dtype
        self._held[key] = value
        return value

    def index_keys(self, keys: Tensor, layer: int) -> Tensor:
        """See CacheOwner."""
        slot, own = self._store.index_slot(layer), keys[0, :, None]
        self._rows.write(slot, own, own)
        return self._rows.gather(slot, keys.dtype)[0][None, :, 0]

    @cached_property
    def _rows(self) -> SlotPass:
        return self._store.rows(self._span)

    def write(self) -> None:
        """Write back what a module kept, or changed in place, and the checkpoint that is asked for."""
        for key, value in self._held.items():
            self._store.view(key, self._span.slot).copy_(value)
            if self._span.checkpoint >= 0:
                self._store.view(key, self._span.checkpoint).copy_(value)
        self._held.clear()


class Piece(NamedTuple):
    """Tokens of one request that modules with states get at once."""

    rows: slice
    """Among the tokens of the pass."""
    states: RequestStates
    cache: RowsCache
    seen: Callable[[Mask], Tensor]
    """What a mask lets them see: bool [1, tokens, positions]."""


def run_by_request(model: nn.Module, classes: tuple[str, ...]) -> None:
    """Have the modules of these classes be called for each request of a pass alone."""
    for module in model.modules():
        if type(module).__name__ in classes and hasattr(module, "layer_idx"):
            module.forward = partial(_ask, module.forward)


def _ask(forward: Any, *args: Any, **named: Any) -> Any:
    return current().by_request(forward, args, named)


def of_request(value: Any, tokens: int, piece: Piece) -> Any:
    """What one request gets of an argument of a module: its rows of tensors [1, tokens, ...], its cache, and of a mask
    what it lets them see."""
    if isinstance(value, RowsCache):
        return piece.cache
    if isinstance(value, Mask):
        return piece.seen(value)
    if isinstance(value, Tensor):
        return value[:, piece.rows] if value.dim() > 1 and value.shape[1] == tokens else value
    if isinstance(value, tuple | list):
        return type(value)(of_request(each, tokens, piece) for each in value)
    if isinstance(value, Mapping):
        return {key: of_request(each, tokens, piece) for key, each in value.items()}
    return value


def joined(parts: list[Any]) -> Any:
    """Results of one module for each of the requests → those of all tokens. Selected positions are as many for all: -1
    stands for none."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(joined([part[index] for part in parts]) for index in range(len(first)))
    if not isinstance(first, Tensor):
        return first
    most = max(part.shape[-1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, most - part.shape[-1]), value=-1) for part in parts], 1)
