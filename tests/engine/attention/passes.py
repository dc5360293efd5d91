"""Attention as a layer calls it."""

from torch import Tensor

from headrace.engine.attention.paged import AttentionPass


def attend(running: AttentionPass, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
    """Keys and values are written first, where they are to be."""
    slots = running.slots(layer)
    if slots is not None:
        slots.write(keys_values)
    return running.attend(layer, query, keys_values)
