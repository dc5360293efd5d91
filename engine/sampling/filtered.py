"""Draws among the most likely tokens (min_p, top_k, top_p), without putting the whole vocabulary in order.

Tokens are ranked by their logits, largest first, and equal ones by their ids. Only the first ranks are found, then
eight times as many, until no token behind them can be left over by the filters; flat distributions need all ranks:

probabilities, by id ─► min_p ─► the first ranks ─► top_k, top_p ─► all that is left over? ─► draw
                                     ▲                                     │ no
                                     └────────── more of them ◄────────────┘
How many were found changes no bit of a result: probabilities and their sum are computed by id, sums over ranks one
after the other, and a rank follows from its row alone.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.core.types.requests.request import SamplingParams
from headrace.engine.kv.device_copies import place

FIRST_RANKS = 64
GROWTH = 8


class _Given(NamedTuple):
    """Rows to draw from."""

    weights: Tensor
    """Of tokens, by id."""
    ranking: Tensor
    weight: Tensor
    """Of all tokens together; this one and the rest have one column."""
    most: Tensor
    """Ranks among which all are that have a weight and are among the top_k."""
    top_k: Tensor
    """The size of the vocabulary for all tokens."""
    top_p: Tensor
    """Infinity for all tokens."""
    uniform: Tensor


def draw_filtered(logits: Tensor, probabilities: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """Draw a token per row. logits: float32 [rows, vocabulary]; probabilities: float64, theirs with the temperature;
    uniform: float64 [rows] in [0, 1). Returns int64 [rows]; any token of a row whose logits are not finite."""
    size = logits.shape[-1]
    top_k = column([entry.top_k or size for entry in params], logits)
    top_p = column([entry.top_p if entry.top_p < 1.0 else math.inf for entry in params], logits)
    weights = probabilities
    if any(entry.min_p for entry in params):
        least = column([entry.min_p for entry in params], logits) * probabilities.amax(dim=-1, keepdim=True)
        weights = probabilities.masked_fill(probabilities < least, 0.0)
    weight = weights.cumsum(dim=-1)[:, -1:]
    most = weights.count_nonzero(dim=-1)[:, None].clamp(min=1).minimum(top_k)
    given = _Given(weights, _ranking(logits), weight, most, top_k, top_p, uniform[:, None])
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)
    for count in _counts(logits, given):
        found, done = _draw_among_first(count, given)
        tokens[rows] = found
        if count < size:
            left = (~done).nonzero()[:, 0]
            if not len(left):
                break
            rows, given = rows[left], _Given(*(each[left] for each in given))
    return tokens


def _counts(logits: Tensor, given: _Given) -> Iterator[int]:
    """How many ranks are looked at, one try after the other. Elsewhere than on the CPU all of them at once: sorting is
    fast there, and looking whether more are needed is not."""
    size, count = logits.shape[-1], FIRST_RANKS
    if logits.device.type == "cpu":
        enough = given.top_p * given.weight / given.weights.amax(dim=-1, keepdim=True)  # if all weigh as much as one
        least = given.most.where(given.top_k < size, given.most.minimum(enough)).min()
        while count * GROWTH <= size:  # half as many cost as much as all
            if count >= least:
                yield count
            count *= GROWTH
    yield size


def _draw_among_first(count: int, given: _Given) -> tuple[Tensor, Tensor]:
    """Tokens drawn among so many first ranks, and whether more ranks would not change them."""
    weights, ranking, weight, most, top_k, top_p, uniform = given
    size = weights.shape[-1]
    ids = (ranking.topk(count) if count < size else ranking.sort(dim=-1, descending=True)).indices
    ranks = torch.arange(count, device=ids.device)
    ranked = weights.gather(-1, ids)
    ranked.masked_fill_(ranks >= top_k, 0.0)
    running = ranked.cumsum(dim=-1)
    limit = top_p * torch.where(top_k < size, running[:, -1:], weight)
    before = running.roll(1, dims=-1).masked_fill(ranks == 0, 0.0)  # weight of the ranks before each
    kept = ranked.masked_fill((before >= limit) & (ranks > 0), 0.0)
    choice = invert(kept, uniform[:, 0])
    done = (most <= count) | ((top_k == size) & (running[:, -1:] >= limit))
    return ids.gather(-1, choice[:, None])[:, 0], done[:, 0]


def _ranking(logits: Tensor) -> Tensor:
    """int64 numbers in the order of logits and ids, no two of them equal: the bits of a float32 in the order of its
    value above the id. The first rank has the largest one."""
    bits = (logits + 0.0).view(torch.int32)  # 0.0 and -0.0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers count backwards
    return (ordered.long() << 32) - torch.arange(logits.shape[-1], device=logits.device)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: per row the first index whose cumulative weight exceeds uniform times the total.

    weights: [rows, n]; uniform: [rows] in [0, 1). Returns int64 [rows]; never an index of weight zero. If weights
    are NaN, any valid index of the row.
    """
    cumulative = weights.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One float64 number for each row."""
    return place(np.array(values, np.float64)[:, None], like.device)
