"""Sizes of the forward passes that CUDA graphs are captured of (engine/layers/graphs.py). Pure arithmetic."""

LARGEST = 1024  # tokens; beyond, launches take the host less time than the kernels take the device
_SIZES = (1, 2, 4, 8, 16, 32, *range(64, 512, 64), *range(512, LARGEST + 1, 128))


def graph_sizes(tokens: int) -> tuple[int, ...]:
    """The sizes for passes of up to so many tokens, ascending; a pass takes the least that holds it. tokens: 0 where
    their number is not known."""
    least = next((size for size in _SIZES if size >= tokens), LARGEST) if tokens else LARGEST
    return tuple(size for size in _SIZES if size <= least)
