"""Log-probabilities of sampled and prompt tokens: log-softmax of the logits as the model gave them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.core.types.request import TokenLogprob

SLICE = 64  # prompt positions whose logits exist at the same time
LOWEST = torch.finfo(torch.float32).min  # stands for the logprob of what cannot be: JSON and peers know no infinity


def token_logprobs(logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprob]:
    """logits: float32 [rows, vocabulary]; one token and a number of alternatives per row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].clamp(min=LOWEST).tolist()
    width = min(max(alternatives, default=0), logits.shape[-1])
    if not width:
        return [TokenLogprob(token, logprob) for token, logprob in zip(tokens, chosen, strict=True)]
    best, indices = logprobs.topk(width, dim=-1)
    values, ids = best.clamp(min=LOWEST).tolist(), indices.tolist()
    return [
        TokenLogprob(token, logprob, tuple(row_ids[:count]), tuple(row_values[:count]))
        for token, logprob, row_ids, row_values, count in zip(tokens, chosen, ids, values, alternatives, strict=True)
    ]


def prompt_logprobs(
    hidden: Tensor, targets: Sequence[int], alternatives: int, head: Callable[[Tensor], Tensor]
) -> list[TokenLogprob]:
    """hidden [positions, hidden size] and the token that follows each position; head gives logits for hidden rows."""
    entries: list[TokenLogprob] = []
    for start in range(0, len(targets), SLICE):
        part = targets[start : start + SLICE]
        entries += token_logprobs(head(hidden[start : start + len(part)]), part, [alternatives] * len(part))
    return entries
