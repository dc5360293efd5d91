"""Products of our own for any number of rows, by small tiles, for Triton's interpreter."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from headrace.engine.model.arithmetic import Normed, Rows, TorchArithmetic, Weight
from headrace.engine.triton.products import OwnProducts, Tile

SMALL = Tile(16, 32, 16, 4, 2)


class Asked(NamedTuple):
    """A product that may be our own."""

    form: str
    normed: bool
    """Its rows are yet to be normed."""


class Always(OwnProducts):
    """All products are our own."""

    def __init__(self, allow: Callable[[Asked], bool] = lambda _: True) -> None:
        """allow: which; others are torch's."""
        super().__init__(dense=True)
        self._allow = allow
        self.asked: list[Asked] = []

    def tile(self, form: str, x: Rows, weight: Weight, half: int = 0) -> Tile | None:
        self.asked.append(Asked(form, isinstance(x, Normed)))
        return SMALL if self._allow(self.asked[-1]) else None


def fused(modules: dict[str, ModuleType], own: OwnProducts | None = None) -> TorchArithmetic:
    """A TritonArithmetic of the interpreter with products of our own, in 16 bits and in float32."""
    arithmetic: Any = modules["arithmetic"]
    made: TorchArithmetic = arithmetic.TritonArithmetic(own or Always())
    return made
