"""Log-probabilities of sampled and prompt tokens: log-softmax of the raw logits, before temperature and filters. The
probabilities of draft data are likewise."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.core.types.requests.draft import DraftTokens
from headrace.core.types.requests.request import TokenLogprob
from headrace.engine.sampling.sampler import NO_TOKEN

SLICE = 64  # prompt positions whose logits are in memory at the same time
LOWEST = torch.finfo(torch.float32).min  # replaces -inf, which JSON and peers cannot represent


def token_logprobs(logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprob]:
    """Logprob of one token per row, and of the row's most likely tokens.

    logits: float32 [rows, vocabulary]. tokens: one per row. alternatives: how many most likely tokens to report per
    row.
    """
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


def wanted_logprobs(logits: Tensor, tokens: list[int], wanted: list[int | None]) -> list[TokenLogprob | None]:
    """Logprobs of the rows that want them and have a token, None for the others.

    logits: [rows, vocabulary]. wanted: number of alternatives per row, None for no logprobs.
    """
    chosen = [index for index, count in enumerate(wanted) if count is not None and tokens[index] != NO_TOKEN]
    results: list[TokenLogprob | None] = [None] * len(tokens)
    if chosen:
        counts = [wanted[index] or 0 for index in chosen]
        entries = token_logprobs(logits[chosen], [tokens[index] for index in chosen], counts)
        for index, entry in zip(chosen, entries, strict=True):
            results[index] = entry
    return results


def draft_tokens(logits: Tensor, tokens: Sequence[int], wanted: Sequence[int]) -> list[DraftTokens | None]:
    """The most likely tokens of the rows that want them and have a token, None for the others.

    logits: [rows, vocabulary]. tokens: one per row. wanted: how many of the most likely ones per row, 0 for none.
    """
    results: list[DraftTokens | None] = [None] * len(tokens)
    for index, count in enumerate(wanted):
        if count and tokens[index] != NO_TOKEN:
            best, ids = torch.softmax(logits[index].float(), dim=-1).topk(min(count, logits.shape[-1]))
            results[index] = DraftTokens(tuple(ids.tolist()), tuple(best.tolist()))
    return results


def prompt_logprobs(
    hidden: Tensor, targets: Sequence[int], alternatives: int, head: Callable[[Tensor], Tensor]
) -> list[TokenLogprob]:
    """Logprobs of prompt tokens.

    hidden: [positions, hidden size]. targets: the token that follows each position. alternatives: most likely tokens to
    report at each position. head: hidden states [rows, hidden size] → logits [rows, vocabulary].
    """
    entries: list[TokenLogprob] = []
    for start in range(0, len(targets), SLICE):
        part = targets[start : start + SLICE]
        entries += token_logprobs(head(hidden[start : start + len(part)]), part, [alternatives] * len(part))
    return entries
