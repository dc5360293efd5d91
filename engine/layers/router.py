"""Router of a mixture of experts: which experts each token goes to, and with which weights."""

import torch
from torch import Tensor

from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader


class Router:
    """Scores the experts of a layer for each token and chooses the best k."""

    def __init__(self, moe: MoeSpec, hidden: int, read: LayerReader, arithmetic: Arithmetic) -> None:
        """Read the weights. hidden: hidden size. Raises ConfigError for a missing or misshapen tensor."""
        self._moe = moe
        self._arithmetic = arithmetic
        name = f"{moe.module}.gate"
        weight = read.unquantized(name, (moe.experts, hidden))
        self._weight = arithmetic.pack_float32(weight) if moe.float32_logits else arithmetic.pack(weight)
        self._bias = read.float32(name, "e_score_correction_bias", (moe.experts,)) if moe.choice_bias else None

    def route(self, x: Tensor, shared: slice | None = None) -> ExpertChoice:
        """Choose the experts of rows [tokens, hidden size]. shared: see choose()."""
        if not len(x):
            shape = (0, self._moe.top_k + (shared is not None))
            return ExpertChoice(x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32))
        linear = self._arithmetic.linear_float32 if self._moe.float32_logits else self._arithmetic.linear
        return self._arithmetic.choose(linear(x, self._weight), self._moe, self._bias, shared)
