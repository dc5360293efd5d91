"""SwiGLU MLP (arXiv 2002.05202) with gate and up in one product."""

from torch import Tensor

from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.weights import LayerReader


class DenseMlp:
    """MLP block that every token goes through whole."""

    def __init__(self, hidden: int, inner: int, read: LayerReader, arithmetic: Arithmetic) -> None:
        """Read the weights. inner: width of the MLP. Raises ConfigError for a missing or misshapen tensor."""
        self._arithmetic = arithmetic
        self._gate_up = read.matrix({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden)  # [2 * inner, hidden]
        self._down = read.matrix({"mlp.down_proj": hidden}, inner)  # [hidden, inner]

    def forward(self, normed: Tensor) -> Tensor:
        """See MlpBlock."""
        return self._arithmetic.linear(self._arithmetic.gated_linear(normed, self._gate_up), self._down)
