"""How much memory something takes up by being done again and again."""

import gc
import tracemalloc
from collections.abc import Callable


def grown_bytes(step: Callable[[int], None], times: int = 4000) -> int:
    """Bytes that are allocated and not freed between the first quarter and the end. step: gets numbers from 0."""
    for number in range(times // 4):
        step(number)
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(times // 4, times):
            step(number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return after - before
    finally:
        tracemalloc.stop()
