"""A pass on the meta device that finds what each layer of a model caches, before a weight is read."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.engine.library.hooks import Asked, Mask

TOKENS = 3


class Seen(NamedTuple):
    """One call of attention."""

    layer: int
    """The layer whose keys and values it attends to."""
    expanded: bool
    """Keys and values were made of what is cached."""
    selected: bool
    """The module had selected positions."""


class Probe:
    """A pass that computes nothing, and notes what modules ask of it. It is Running and a CacheOwner."""

    def __init__(self) -> None:
        self.offsets = 0
        self.cached: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        """By layer: heads and width of keys, and of values."""
        self.seen: list[Seen] = []
        self.stateful: set[str] = set()
        """Classes of modules that keep something of a request besides keys and values."""
        self._stack: list[nn.Module] = []
        self._kept: list[Tensor] = []
        self._layer_of: dict[int, int] = {}
        self._last = 0

    def watch(self, model: nn.Module) -> list[Any]:
        """Follow which module is running. Returns hooks to be removed."""

        def leave(*_: Any) -> None:
            self._stack.pop()

        hooks: list[Any] = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(lambda each, _: self._stack.append(each)))
            hooks.append(module.register_forward_hook(leave))
        return hooks

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """See CacheOwner."""
        self.cached[layer] = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        self._kept.append(keys)
        self._layer_of[id(keys)] = self._last = layer
        return keys, values

    def state(self, value: Any) -> Any:
        """See CacheOwner."""
        owners = [type(module).__name__ for module in self._stack if hasattr(module, "layer_idx")]
        self.stateful.add((owners or [type(self._stack[-1]).__name__])[-1])
        return value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, asked: Asked) -> Tensor:
        """See Running."""
        layer = self._layer_of.get(id(keys))
        self.seen.append(Seen(self._last if layer is None else layer, layer is None, asked.indices is not None))
        return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])

    def experts(self, module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Running."""
        return torch.empty_like(x)

    def mask_tensor(self, mask: Mask) -> Tensor:
        """See Running."""
        return torch.ones(1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
