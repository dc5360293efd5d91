"""The cache object that modules of transformers are given: it holds nothing, and asks the pass that is under way."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

UNSEEN = "a module asks its cache for something that the probe has not seen"


class CacheOwner:
    """What a cache asks. Whatever is not overridden raises RuntimeError: the probe has not seen a module ask for it."""

    offsets: Tensor | int = 0
    """Positions of the tokens of a pass, less their places in it: int64 [tokens], or one number for all."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keep keys and values [1, heads, tokens, width] of a layer; return those to attend to."""
        raise RuntimeError(UNSEEN)

    def state(self, layer: int, kind: str, number: int) -> Tensor | None:
        """What a layer has kept of a request besides keys and values [1, ...]; None at its beginning."""
        raise RuntimeError(UNSEEN)

    def keep(self, layer: int, kind: str, number: int, value: Tensor) -> Tensor:
        """Keep it. Returns it."""
        raise RuntimeError(UNSEEN)

    def index_keys(self, keys: Tensor, layer: int) -> Tensor:
        """Keep the keys [1, tokens, width] by which a layer selects positions. Returns those of all positions."""
        raise RuntimeError(UNSEEN)

    def unknown(self) -> Any:
        """A module looks for something that no cache of ours has."""
        raise RuntimeError(UNSEEN)


class RowsCache(Cache):  # type: ignore[misc]
    """A cache of transformers for a pass over rows of several requests, side by side in one sequence.

    Lengths are answered so that they are right wherever a model adds them to a range over the tokens.
    """

    is_compileable = False

    def __init__(self, owner: CacheOwner, layers: int) -> None:
        """layers: of the model. The base class is not initialised: there are no layers of transformers."""
        self._owner = owner
        self._layers = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """See CacheOwner."""
        return self._owner.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """See CacheOwner.offsets."""
        return self._owner.offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks are functions of positions; nothing has this size."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See get_mask_sizes()."""
        return 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """None that a model as a whole needs to know of."""
        return False

    def __len__(self) -> int:
        return self._layers

    is_sliding = property(lambda self: [False] * len(self))
    is_linear = property(lambda self: [False] * len(self))
    is_dummy = property(lambda self: [False] * len(self))
    is_initialized = property(lambda self: True)
    is_croppable = property(lambda self: False)

    @property
    def layers(self) -> Any:
        """See CacheOwner.unknown()."""
        return self._owner.unknown()

    def is_recording_past(self, layer_idx: int) -> bool:
        """No."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See CacheOwner.state(), as get_recurrent_state() and get_linear_cache()."""
        return self._owner.state(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See get_conv_state()."""
        return self._owner.state(layer_idx, "recurrent", state_idx)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """See get_conv_state()."""
        return self._owner.state(layer_idx, "linear", 0)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last columns of inputs of a convolution [1, channels, tokens], as many as its kernel has. Returns
        them behind those that were kept before, or behind zeros where they are fewer than that."""
        before = self._owner.state(layer_idx, "conv", state_idx)
        if before is not None:
            width, found = before.shape[-1], torch.cat((before, conv_states), -1)
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            found = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._owner.keep(layer_idx, "conv", state_idx, found[..., -width:])
        return found

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """See CacheOwner.keep()."""
        return self._owner.keep(layer_idx, "recurrent", state_idx, recurrent_states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """See CacheOwner.keep()."""
        self._owner.keep(layer_idx, "linear", 0, linear_cache)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """See CacheOwner.index_keys()."""
        return self._owner.index_keys(indexer_key_states, layer_idx)
