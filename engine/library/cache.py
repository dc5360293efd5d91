"""The cache object that modules of transformers are given: it holds nothing, and asks the pass that is under way."""

from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache


class CacheOwner(Protocol):
    """What a cache asks."""

    @property
    def offsets(self) -> Tensor | int:
        """Positions of the tokens of a pass, less their places in it: int64 [tokens], or one number for all."""
        ...

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keep keys and values [1, heads, tokens, width] of a layer; return those to attend to."""
        ...

    def state(self, value: Any) -> Any:
        """A module keeps something of a request besides keys and values."""
        ...


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
        """See CacheOwner.state()."""
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
        """See CacheOwner.state()."""
        return self._owner.state([])

    def is_recording_past(self, layer_idx: int) -> bool:
        """No."""
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> Any:
        """See CacheOwner.state(), as the methods below."""
        return self._owner.state(None)

    get_recurrent_state = get_linear_cache = set_linear_cache = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Any:
        """See CacheOwner.state()."""
        return self._owner.state(conv_states)

    update_recurrent_state = update_conv_state

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Any:
        """See CacheOwner.state()."""
        return self._owner.state(indexer_key_states)
