"""Layers of experts with random weights, and groups of threads in the place of ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from headrace.engine.collectives.operations import Collectives
from headrace.engine.dtypes import Precision
from headrace.engine.layers.exchange import Exchange, NoExchange
from headrace.engine.layers.moe import MoeMlp
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader
from headrace.engine.native.kernel_calls import load_kernels
from tests.engine.collectives.threads import Meeting, ThreadCollectives, run_ranks

HIDDEN = 16
KERNELS = load_kernels(wide=False, bfloat16=False)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="torch's products depend on the number of rows")
DEADLINE_S = 15.0
T = TypeVar("T")
_SIZES: dict[str, Any] = {"intermediate_size": 12, "layer_kinds": ("moe",)}
SPECS = {
    "qwen3": MoeSpec(**_SIZES, experts=11, top_k=3, normalized=True, rounded_weights=True),
    "mixtral": MoeSpec(**_SIZES, experts=5, top_k=2, normalized=True, module="block_sparse_moe"),
    "deepseek-v2": MoeSpec(
        **_SIZES, experts=12, top_k=3, shared_size=24, float32_logits=True, groups=4, top_groups=2, scaling=1.5
    ),
    "deepseek-v3": MoeSpec(
        **_SIZES, experts=12, top_k=4, shared_size=12, scores="sigmoid", float32_logits=True, choice_bias=True,
        groups=3, top_groups=2, group_score="two best", normalized=True, scaling=2.5,
    ),
}  # fmt: skip


class RandomWeights:
    """A checkpoint whose every tensor is random; a tensor follows from its name. Notes what was read."""

    def __init__(self, scale: float = 0.5) -> None:
        self.read_names: list[str] = []
        self._scale = scale

    def read(self, name: str, shape: tuple[int, ...], rows: Any = None, columns: Any = None) -> torch.Tensor:
        """See Checkpoint."""
        self.read_names.append(name)
        seed = int.from_bytes(name.encode()[-24:], "little") % (1 << 31)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * self._scale
        part = whole if rows is None else whole[list(rows)]
        return part if columns is None else part[:, list(columns)]

    def read_int8(self, name: str, shape: tuple[int, int], rows: Any = None, columns: Any = None) -> None:
        """See Checkpoint."""


def make_mixture(
    moe: MoeSpec,
    exchange: Exchange | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    arithmetic: Arithmetic | None = None,
    checkpoint: RandomWeights | None = None,
    hidden: int = HIDDEN,
) -> MoeMlp:
    """A layer of experts; without exchange it holds all of them. Products are by native kernels where there are any."""
    arithmetic = arithmetic or KERNELS or TorchArithmetic()
    precision = Precision(dtype, dtype, dtype, int8)
    read = LayerReader(checkpoint or RandomWeights(), 0, precision, "cpu", arithmetic.pack)
    return MoeMlp(moe, hidden, read, arithmetic, (exchange or NoExchange(moe.experts),))


def random_rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> torch.Tensor:
    """Rows [count, hidden]."""
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


Groups = tuple[Collectives, Collectives, Collectives]


def run_stage(dp: int, tp: int, work: Callable[[int, int, Groups], T]) -> list[T]:
    """The results of work(replica, shard, (tp, dp, ep)) at each rank of a stage, in order."""
    shards = [Meeting(tp, DEADLINE_S) for _ in range(dp)]
    across = [Meeting(dp, DEADLINE_S) for _ in range(tp)]

    def one(ep: Collectives) -> T:
        replica, shard = divmod(ep.rank, tp)
        groups = (ThreadCollectives(shards[replica], shard), ThreadCollectives(across[shard], replica), ep)
        try:
            return work(replica, shard, groups)
        except BaseException as error:
            shards[replica].leave(str(error))
            across[shard].leave(str(error))
            raise

    return run_ranks(dp * tp, one, DEADLINE_S)
