"""The experts that a router chooses for each token, and with which weights (top-k gating, with groups as in
DeepSeek-V3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.model.moe_spec import MoeSpec

NO_EXPERT = -1  # in place of an expert that another rank computes, or of a padded row; never computed
SMALLEST_SUM = 1e-20  # added to a sum of weights before division by it, as DeepSeek-V3 does


class ExpertChoice(NamedTuple):
    """Experts of the rows of a forward pass."""

    experts: Tensor
    """int64 [tokens, k]: each row's experts differ from one another, except for NO_EXPERT."""
    weights: Tensor
    """float32 [tokens, k]: factors of the experts' results."""


def choose(logits: Tensor, moe: MoeSpec, bias: Tensor | None = None, shared: slice | None = None) -> ExpertChoice:
    """The best k experts by the router's logits [tokens, experts], which are in the dtype of their product.

    bias: float32 [experts], added to scores for the choice only. shared: tokens that go to the shared experts, too, as
    one more expert behind all others, of weight 1; the rest has NO_EXPERT there. A row's result does not depend on the
    other rows, bit for bit.
    """
    chosen = _choose(logits, moe, bias)
    if shared is None:
        return chosen
    last = torch.full((len(logits), 1), NO_EXPERT, device=logits.device)
    last[shared] = moe.experts
    experts = torch.cat((chosen.experts, last), 1)
    return ExpertChoice(experts, torch.cat((chosen.weights, torch.ones_like(last, dtype=torch.float32)), 1))


def _choose(logits: Tensor, moe: MoeSpec, bias: Tensor | None) -> ExpertChoice:
    scores = _scores(logits.float(), moe)
    eligible = _in_best_groups(scores if bias is None else scores + bias, moe)
    experts = torch.topk(eligible, moe.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if moe.normalized:
        # cumsum() adds in order; sum() in an order of torch's choice, which may depend on the number of rows.
        total = weights.cumsum(-1)[:, -1:]
        weights = weights / (total + SMALLEST_SUM if moe.scores == "sigmoid" else total)
    if moe.rounded_weights:
        weights = weights.to(logits.dtype).float()
    return ExpertChoice(experts, weights if moe.scaling == 1.0 else weights * moe.scaling)


def _scores(logits: Tensor, moe: MoeSpec) -> Tensor:
    if moe.scores == "softmax":
        return logits.softmax(-1)
    # sigmoid(x) is the first of softmax(x, 0). torch.sigmoid computes the last elements of a tensor otherwise than
    # those before them, so that a row's bits would depend on the number of rows.
    return torch.stack((logits, torch.zeros_like(logits)), -1).softmax(-1)[..., 0]


def _in_best_groups(scores: Tensor, moe: MoeSpec) -> Tensor:
    """Scores [tokens, experts] with those outside a token's best groups of experts set below all others."""
    if moe.groups == 1:
        return scores
    grouped = scores.view(len(scores), moe.groups, -1)
    if moe.group_score == "maximum":
        group_scores, lowest = grouped.amax(-1), 0.0
    else:
        group_scores, lowest = grouped.topk(2, dim=-1).values.sum(-1), float("-inf")
    best = torch.topk(group_scores, moe.top_groups, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[:, :, None], lowest).flatten(1)
