"""SwiGLU MLP (arXiv 2002.05202) with gate and up in one product."""

from torch import Tensor

from headrace.engine.collectives.operations import Collectives
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.lora import AdaptedLinear, Groups
from headrace.engine.model.arithmetic import Arithmetic, Rows, Stream
from headrace.engine.model.weights import LayerReader


class DenseMlp:
    """MLP block that every token goes through whole.

    A shard has some columns of the inner width: rows of gate and up, columns of down; the outputs of all shards are
    summed.
    """

    exchanges = False
    fixed = True

    def __init__(
        self, hidden: int, inner: int, read: LayerReader, arithmetic: Arithmetic, columns: range, tp: Collectives
    ) -> None:
        """Read the weights. inner: width of the whole MLP. columns: of it, this shard's. tp: the shards of this layer.
        Raises ConfigError for a missing or misshapen tensor."""
        self._tp = tp
        rows = {"mlp.gate_proj": columns, "mlp.up_proj": columns}
        both, output = dict.fromkeys(rows, inner), {"mlp.down_proj": hidden}
        gate_up = read.matrix(both, hidden, rows=rows)  # [2 * columns, hidden]
        down = read.matrix(output, inner, columns=columns)  # [hidden, columns]
        self.gate_up = AdaptedLinear(arithmetic, gate_up, deltas=read.deltas(both, rows=rows))
        self.down = AdaptedLinear(arithmetic, down, deltas=read.deltas(output, columns=columns))

    def steps(
        self,
        normed: Rows,
        half: int = 0,
        groups: Groups = (),
        padding: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Steps[Tensor | Stream]:
        """See MlpBlock."""
        inner = self.gate_up.gated(normed, groups)
        if hidden is not None and self._tp.size == 1:
            return self.down.add_to(hidden, inner, groups)
        summed = self._tp.all_reduce(self.down(inner, groups))
        if self._tp.size > 1:
            yield
        return summed.wait()
