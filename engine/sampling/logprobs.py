"""Log-probabilities of sampled and prompt tokens: log-softmax of the raw logits, before temperature and filters. The
probabilities of draft data are likewise."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.core.types.requests.draft import DraftTokens
from headrace.core.types.requests.request import SamplingParams, TokenLogprob
from headrace.engine.kv.device_copies import begin_copy, place, select_rows
from headrace.engine.sampling.sampler import NO_TOKEN

SLICE = 64  # prompt positions whose logits are in memory at the same time
LOWEST = torch.finfo(torch.float32).min  # replaces -inf, which JSON and peers cannot represent


def _columns(logits: Tensor, tokens: Tensor, width: int, labels: Tensor | None = None) -> Tensor:
    """float64 [rows, 1 + 2 * width], which holds both exactly, so that one copy to the host carries them: a token's
    logprob, those of the most likely ones, and their ids. labels: int64 [rows, width], in place of the most likely."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None])
    if labels is None:
        others, ids = logprobs.topk(min(width, logits.shape[-1]), dim=-1)
    else:
        others, ids = logprobs.gather(-1, labels), labels
    return torch.cat((chosen.clamp(min=LOWEST).double(), others.clamp(min=LOWEST).double(), ids.double()), dim=1)


def _entries(columns: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprob]:
    """What _columns() gives for tokens, with so many alternatives each."""
    width = columns.shape[1] // 2
    entries = []
    for token, (logprob, *rest), count in zip(tokens, columns.tolist(), alternatives, strict=True):
        best, ids = rest[:width], map(int, rest[width:])
        entries.append(TokenLogprob(token, logprob, tuple(ids)[:count], tuple(best[:count])))
    return entries


def no_logprobs(tokens: Sequence[int]) -> list[None]:
    """Of rows that want none."""
    return [None] * len(tokens)


def sampled_logprobs(
    logits: Tensor, tokens: Tensor, wanted: Sequence[SamplingParams]
) -> Callable[[Sequence[int]], Sequence[TokenLogprob | None]]:
    """Logprobs of the rows that want them and have a token, None for the others.

    logits: float32 [rows, vocabulary]. tokens: int64 [rows], NO_TOKEN where there is none. wanted: logprobs and
    label_token_ids of each row. Returns what gives them, called with the tokens when they are in host memory.
    """
    asked = [(index, params) for index, params in enumerate(wanted) if params.logprobs is not None]
    if not asked:
        return no_logprobs
    parts = []
    for labeled in (False, True):
        chosen = {index: params for index, params in asked if bool(params.label_token_ids) is labeled}
        if not chosen:
            continue
        given = [params.label_token_ids for params in chosen.values()]
        counts = list(map(len, given)) if labeled else [params.logprobs or 0 for params in chosen.values()]
        labels = _padded(given, max(counts), logits.device) if labeled else None
        rows = list(chosen)
        own = select_rows(tokens, rows).clamp(min=0)
        columns = begin_copy(_columns(select_rows(logits, rows), own, max(counts), labels))
        parts.append((rows, counts, columns))

    def read(tokens: Sequence[int]) -> list[TokenLogprob | None]:
        found: list[TokenLogprob | None] = [None] * len(tokens)
        for rows, counts, columns in parts:
            for index, entry in zip(rows, _entries(columns, [tokens[row] for row in rows], counts), strict=True):
                found[index] = None if tokens[index] == NO_TOKEN else entry
        return found

    return read


def _padded(labels: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    """Labels of rows: int64 [rows, width], the shorter ones filled up with their first."""
    rows = np.array([(*row, *row[:1] * (width - len(row))) for row in labels], np.int64)
    return place(rows, device)


def draft_tokens(logits: Tensor, wanted: Sequence[int]) -> Callable[[Sequence[int]], list[DraftTokens | None]]:
    """The most likely tokens of the rows that want them and have a token, None for the others.

    logits: [rows, vocabulary]. wanted: how many of the most likely ones per row, 0 for none. Returns as
    sampled_logprobs().
    """
    columns = {}
    for index, count in enumerate(wanted):
        if count:
            best, ids = torch.softmax(logits[index].float(), dim=-1).topk(min(count, logits.shape[-1]))
            columns[index] = begin_copy(torch.stack((best.double(), ids.double())))  # one copy, as of _columns()

    def read(tokens: Sequence[int]) -> list[DraftTokens | None]:
        found: list[DraftTokens | None] = [None] * len(tokens)
        for index, both in columns.items():
            if tokens[index] != NO_TOKEN:
                weights, numbers = both.tolist()
                found[index] = DraftTokens(tuple(map(int, numbers)), tuple(weights))
        return found

    return read


def prompt_logprobs(
    hidden: Tensor, targets: Sequence[int], alternatives: int, head: Callable[[Tensor], Tensor]
) -> Callable[[], list[TokenLogprob]]:
    """Logprobs of prompt tokens.

    hidden: [positions, hidden size]. targets: the token that follows each position. alternatives: most likely tokens to
    report at each position. head: hidden states [rows, hidden size] → logits [rows, vocabulary]. Returns what gives
    them when they are in host memory.
    """
    if not targets:
        return list
    following = torch.split(place(np.array(targets, np.int64), hidden.device), SLICE)
    rows = torch.split(hidden[: len(targets)], SLICE)
    found = [_columns(head(states), part, alternatives) for states, part in zip(rows, following, strict=True)]
    columns = begin_copy(torch.cat(found))
    return lambda: _entries(columns, targets, [alternatives] * len(targets))
