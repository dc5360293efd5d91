"""From logits to tokens.

Order of the filters as in vLLM: temperature, min_p, top_k, top_p; each works on what the one before left. One uniform
number chooses from what remains, by the inverse of the cumulative distribution. With a seed that number follows from
(seed, position) alone, so a request gets the same tokens in any batch.
"""

import random
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from headrace.core.types.request import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this divide logits into infinities; they mean greedy


class SampleRow(NamedTuple):
    """position: of the token to be sampled; generated: tokens of the request sampled before it."""

    params: SamplingParams
    position: int
    generated: int


class Sampler:
    """entropy: where requests without a seed get their numbers from."""

    def __init__(self, entropy: random.Random) -> None:
        self._entropy = entropy

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One token per row of float32 logits [rows, vocabulary]; the logits are left as they are."""
        logits = _without_early_stops(logits, rows)
        tokens = logits.argmax(dim=-1)
        drawn = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        for filtered in (False, True):  # unfiltered rows need no sorting
            chosen = [index for index in drawn if _is_filtered(rows[index].params) is filtered]
            if chosen:
                params = [rows[index].params for index in chosen]
                uniform = [self._uniform(rows[index]) for index in chosen]
                draw = _draw_filtered if filtered else _draw
                tokens[chosen] = draw(logits[chosen], params, torch.tensor(uniform, dtype=torch.float64))
        return tokens.tolist()

    def _uniform(self, row: SampleRow) -> float:
        if row.params.seed is None:
            return self._entropy.random()
        return seeded_uniform(row.params.seed, row.position)


def seeded_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits that follows from seed (taken modulo 2^64) and position."""
    key = struct.pack("<QQ", seed % (1 << 64), position)
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _without_early_stops(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Rows below their min_tokens cannot take a stop token."""
    early = [
        index for index, row in enumerate(rows) if row.params.stop_token_ids and row.generated < row.params.min_tokens
    ]
    if not early:
        return logits
    logits = logits.clone()
    for index in early:
        stops = [token for token in rows[index].params.stop_token_ids if 0 <= token < logits.shape[-1]]
        logits[index, stops] = -torch.inf
    return logits


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _scaled(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return logits.double() / _column([entry.temperature for entry in params], logits)


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    return _invert(torch.softmax(_scaled(logits, params), dim=-1), uniform.to(logits.device))


def _draw_filtered(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    # Stable, so that equal logits keep the order of their ids.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(_scaled(ordered, params), dim=-1)
    keep = probabilities >= _column([entry.min_p for entry in params], logits) * probabilities[:, :1]
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    keep &= ranks < _column([entry.top_k or logits.shape[-1] for entry in params], logits)
    probabilities = probabilities.masked_fill(~keep, 0.0)
    probabilities /= probabilities.sum(dim=-1, keepdim=True)
    better = probabilities.cumsum(dim=-1) - probabilities  # mass of the tokens ranked before
    top_p = _column([entry.top_p for entry in params], logits)
    keep = (better < top_p) | (top_p >= 1.0)
    keep[:, 0] = True
    choice = _invert(probabilities.masked_fill(~keep, 0.0), uniform.to(logits.device))
    return ids.gather(-1, choice[:, None])[:, 0]


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index per row where the cumulative weight exceeds uniform times the whole: never a zero weight."""
    cumulative = weights.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
