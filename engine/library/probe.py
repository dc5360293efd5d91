"""A pass on the meta device that finds what each layer of a model caches, before a weight is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.engine.library.cache import CacheOwner
from headrace.engine.library.hooks import Asked, Mask, window_of

TOKENS = 3


class Seen(NamedTuple):
    """One call of attention."""

    layer: int
    """The layer whose keys and values it attends to."""
    expanded: bool
    """Keys and values were made of what is cached."""
    heads: int
    """Query heads."""
    window: int
    """Of all positions that it sees the last so many, see window_of(); 0 where the module selects positions, too."""


class Probe(CacheOwner):
    """A pass that computes nothing, and notes what modules ask of it. It is Running and a CacheOwner."""

    def __init__(self) -> None:
        self.cached: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        """By layer: heads and width of keys, and of values."""
        self.seen: list[Seen] = []
        self.states: dict[int, dict[tuple[str, int], tuple[int, ...]]] = {}
        """By layer, and by kind and number: shapes of what is kept of a request besides keys and values."""
        self.indexed: dict[int, int] = {}
        """By layer: width of the keys by which it selects positions."""
        self.mixers: set[str] = set()
        """Classes of modules that keep any of these."""
        self.called: set[int] = set()
        """Modules, by their ids."""
        self.strangers: set[str] = set()
        """Classes of modules that look for something else."""
        self._stack: list[nn.Module] = []
        self._kept: list[object] = []  # so that their ids stay theirs
        self._windows: dict[tuple[int, int], int] = {}
        self._layer_of: dict[int, int] = {}
        self._last = 0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow which module of a model on the meta device is running. Experts are left out: they keep nothing, and
        some look into what was chosen, which is not there."""

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(module)
            self.called.add(id(module))

        def leave(*_: Any) -> None:
            self._stack.pop()

        hooks: list[Any] = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave))
            if name.endswith(".experts"):
                module.forward = lambda x, *_, **__: torch.empty_like(x)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """See CacheOwner."""
        self.cached[layer] = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        self._kept.append(keys)
        self._layer_of[id(keys)] = self._last = layer
        return keys, values

    def state(self, layer: int, kind: str, number: int) -> Tensor | None:
        """See CacheOwner."""
        self.mixers.add(self._owner())
        return None

    def keep(self, layer: int, kind: str, number: int, value: Tensor) -> Tensor:
        """See CacheOwner."""
        self.mixers.add(self._owner())
        self.states.setdefault(layer, {})[kind, number] = tuple(value.shape[1:])
        return value

    def index_keys(self, keys: Tensor, layer: int) -> Tensor:
        """See CacheOwner."""
        self.mixers.add(self._owner())
        self.indexed[layer] = keys.shape[2]
        return keys

    def unknown(self) -> Any:
        """See CacheOwner."""
        self.strangers.add(self._owner())
        return []

    def by_request(self, forward: Any, args: Any, named: Any) -> Any:
        """See Running. Modules are not wrapped on the meta device."""
        return forward(*args, **named)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, asked: Asked) -> Tensor:
        """See Running."""
        layer = self._layer_of.get(id(keys))
        key = id(asked.mask), asked.window
        if key not in self._windows:
            self._windows[key] = window_of(asked.mask, asked.window)
            self._kept.append(asked.mask)
        window = 0 if asked.indices is not None else self._windows[key]
        self.seen.append(Seen(self._last if layer is None else layer, layer is None, query.shape[1], window))
        return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])

    def experts(self, module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Running."""
        return torch.empty_like(x)

    def mask_tensor(self, mask: Mask) -> Tensor:
        """See Running."""
        return torch.ones(1, TOKENS, TOKENS, dtype=torch.bool, device="meta")

    def _owner(self) -> str:
        """Class of the innermost module under way that belongs to a layer."""
        owners = [type(module).__name__ for module in self._stack if hasattr(module, "layer_idx")]
        return (owners or [type(self._stack[-1]).__name__])[-1]
