"""What modules of transformers call in place of their own attention, masks and experts, by the name "headrace".

Each thread has one pass under way (running()); the functions ask it. Sources: the interfaces of attention, masks and
experts in transformers 5.23.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "headrace"
FAR = 1 << 16  # positions at which a window is told from other masks
_thread = threading.local()


class Running(Protocol):
    """A pass through a model's modules."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, asked: "Asked") -> Tensor:
        """Attention of one layer. query: [1, heads, tokens, width]; keys and values as update() of the cache returned
        them. Returns [1, tokens, heads, width of values]."""
        ...

    def experts(self, module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums of the results of the chosen experts, of the shape of x. chosen, weights: [tokens, k]."""
        ...

    def by_request(self, forward: Any, args: Any, named: Any) -> Any:
        """Call a module for each request alone. Returns what it gives for all tokens."""
        ...

    def mask_tensor(self, mask: "Mask") -> "Mask | Tensor":
        """What a module gets that indexes a mask."""
        ...


class Asked:
    """What a layer asks of its attention beside its tensors."""

    def __init__(
        self, mask: object, scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
        indices: Tensor | None,
    ) -> None:  # fmt: skip
        """mask: a Mask, or None. indices: positions that a module has selected for each token."""
        self.mask = mask
        self.scale = scale
        self.window = window or 0
        self.softcap = softcap or 0.0
        self.sinks = sinks
        self.indices = indices


class Mask:
    """A mask that stays a function of positions, as transformers composed it."""

    dtype, ndim, device = torch.bool, 4, torch.device("cpu")

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self.causal = function is causal_mask_function
        """It hides what comes later, and nothing else."""

    def __getitem__(self, _: object) -> "Mask | Tensor":
        return current().mask_tensor(self)

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [queries, keys] of positions int64 [queries] and [keys]."""
        zero = torch.zeros((), dtype=torch.long)
        return self._function(zero, zero, queries[:, None], keys[None]).expand(len(queries), len(keys))


def positions_seen(mask: object, window: int, queries: NDArray[np.int64], positions: int) -> NDArray[np.bool_]:
    """bool [queries, positions]: what tokens at these positions see. Without a function that says it: what is not after
    them, and in the window. Raises ValueError for a mask that is no function."""
    keys = np.arange(positions)
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError("a module makes a mask of its own")
    if isinstance(mask, Mask) and not (mask.causal and window):
        seen: NDArray[np.bool_] = mask.allowed(torch.from_numpy(queries), torch.from_numpy(keys)).numpy()
        return seen
    causal = keys <= queries[:, None]
    return causal & (keys > queries[:, None] - window) if window else causal


def window_of(mask: object, window: int) -> int:
    """How many positions, the last ones up to its own, each token far from a sequence's beginning sees; 0 where it sees
    others, all, or more than half of FAR."""
    tokens, positions = np.arange(FAR - 8, FAR), np.arange(FAR)
    try:
        seen = positions_seen(mask, window, tokens, FAR)
    except (ValueError, RuntimeError):  # RuntimeError: of a mask that depends on tensors of the meta device
        return 0
    width = int(seen[0].sum())
    last = (positions <= tokens[:, None]) & (positions > tokens[:, None] - width)
    return width if width <= FAR // 2 and np.array_equal(seen, last) else 0


@contextmanager
def running(batch: Running) -> Iterator[None]:
    """Modules called within belong to this pass."""
    _thread.batch = batch
    try:
        yield
    finally:
        _thread.batch = None


def current() -> Running:
    """The pass that this thread has under way."""
    batch: Running = _thread.batch
    return batch


@cache
def register() -> None:
    """Make the functions known to transformers, once."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    indices: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    asked = Asked(attention_mask, scaling, sliding_window, softcap, s_aux, indices)
    return current().attend(query, key, value, asked), None


def _mask(*, mask_function: Callable[..., Tensor], **_: Any) -> Mask:
    return Mask(mask_function)


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return current().experts(module, hidden_states, top_k_index, top_k_weights)
