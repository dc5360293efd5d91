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
        self._weight = arithmetic.pack(weight.float() if moe.float32_logits else weight)
        self._bias = read.float32(name, "e_score_correction_bias", (moe.experts,)) if moe.choice_bias else None

    def route(self, x: Tensor) -> ExpertChoice:
        """Choose the experts of rows [tokens, hidden size]."""
        if not len(x):
            shape = (0, self._moe.top_k)
            return ExpertChoice(x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32))
        rows = x.float() if self._moe.float32_logits else x
        return self._arithmetic.choose(self._arithmetic.linear(rows, self._weight), self._moe, self._bias)
