"""Log-probabilities of sampled and prompt tokens: log-softmax of the raw logits, before temperature and filters. The
probabilities of draft data are likewise."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.core.types.requests.draft import DraftTokens
from headrace.core.types.requests.request import TokenLogprob
from headrace.engine.kv.device_copies import place, select_rows
from headrace.engine.sampling.sampler import NO_TOKEN

SLICE = 64  # prompt positions whose logits are in memory at the same time
LOWEST = torch.finfo(torch.float32).min  # replaces -inf, which JSON and peers cannot represent


def token_logprobs(logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprob]:
    """Logprob of one token per row, and of the row's most likely tokens.

    logits: float32 [rows, vocabulary]. tokens: one per row. alternatives: how many most likely tokens to report per
    row.
    """
    return _entries(_columns(logits, tokens, max(alternatives, default=0)), tokens, alternatives)


def _columns(logits: Tensor, tokens: Sequence[int], width: int) -> Tensor:
    """float64 [rows, 1 + 2 * width], which holds both exactly, so that one copy to the host carries them: a token's
    logprob, those of the most likely ones, and their ids."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, place(np.array(tokens, np.int64), logits.device)[:, None])
    best, ids = logprobs.topk(min(width, logits.shape[-1]), dim=-1)
    return torch.cat((chosen.clamp(min=LOWEST).double(), best.clamp(min=LOWEST).double(), ids.double()), dim=1)


def _entries(columns: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprob]:
    """What _columns() gives for tokens, with so many alternatives each."""
    width = columns.shape[1] // 2
    entries = []
    for token, (logprob, *rest), count in zip(tokens, columns.tolist(), alternatives, strict=True):
        best, ids = rest[:width], map(int, rest[width:])
        entries.append(TokenLogprob(token, logprob, tuple(ids)[:count], tuple(best[:count])))
    return entries


def wanted_logprobs(logits: Tensor, tokens: list[int], wanted: list[int | None]) -> list[TokenLogprob | None]:
    """Logprobs of the rows that want them and have a token, None for the others.

    logits: [rows, vocabulary]. wanted: number of alternatives per row, None for no logprobs.
    """
    chosen = [index for index, count in enumerate(wanted) if count is not None and tokens[index] != NO_TOKEN]
    results: list[TokenLogprob | None] = [None] * len(tokens)
    if chosen:
        counts = [wanted[index] or 0 for index in chosen]
        of_chosen = select_rows(logits, chosen)
        entries = token_logprobs(of_chosen, [tokens[index] for index in chosen], counts)
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
            weights, numbers = torch.stack((best.double(), ids.double())).tolist()  # one copy, as of _columns()
            results[index] = DraftTokens(tuple(map(int, numbers)), tuple(weights))
    return results


def prompt_logprobs(
    hidden: Tensor, targets: Sequence[int], alternatives: int, head: Callable[[Tensor], Tensor]
) -> list[TokenLogprob]:
    """Logprobs of prompt tokens.

    hidden: [positions, hidden size]. targets: the token that follows each position. alternatives: most likely tokens to
    report at each position. head: hidden states [rows, hidden size] → logits [rows, vocabulary].
    """
    if not targets:
        return []
    parts = [targets[start : start + SLICE] for start in range(0, len(targets), SLICE)]
    rows = torch.split(hidden[: len(targets)], SLICE)
    columns = [_columns(head(states), part, alternatives) for states, part in zip(rows, parts, strict=True)]
    return _entries(torch.cat(columns), targets, [alternatives] * len(targets))
