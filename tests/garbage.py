"""What only the garbage collector finds: objects that refer to each other in a cycle."""

import gc
from collections import Counter


class Garbage:
    """Garbage since this was made, or since found() was asked last. As a context manager: until its end nothing else
    collects."""

    def __enter__(self) -> "Garbage":
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()

    def forget(self) -> None:
        """Take what there is by now for found."""
        gc.collect()

    def found(self) -> Counter[str]:
        """Objects by the names of their types."""
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
