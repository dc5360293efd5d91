"""Sampler: logits to tokens, with temperature, min_p, top_k, top_p and seeds.

Filters are applied in vLLM's order (temperature, min_p, top_k, top_p), each to what the one before left. The token is
chosen by inverse transform sampling: one uniform number, looked up in the cumulative distribution. With a seed that
number follows from (seed, position) alone, so a request gets the same tokens in any batch. Nucleus sampling (top_p):
arXiv 1904.09751; min_p: arXiv 2407.01082.
"""

import random
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from headrace.core.types.requests.request import SamplingParams
from headrace.engine.kv.device_copies import place
from headrace.engine.sampling.filtered import column, draw_filtered, invert

GREEDY_BELOW = 1e-5  # lower temperatures mean greedy: dividing by them would overflow
NO_TOKEN = -1  # in place of the token of a row whose logits are not finite


class SampleRow(NamedTuple):
    """One row of logits to sample from."""

    params: SamplingParams
    position: int  # of the token to be sampled, in the sequence
    generated: int  # tokens of the request sampled before it


class Sampler:
    """Samples one token per row of logits."""

    def __init__(self, entropy: random.Random) -> None:
        """entropy: random numbers for requests without a seed."""
        self._entropy = entropy

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Sample one token per row: int64 [rows]. logits: float32 [rows, vocabulary], not modified.

        Returns NO_TOKEN for a row with NaN or positive infinity, or with nothing above negative infinity. Everything is
        decided on the device: the host waits for nothing.
        """
        given, logits = logits, _without_early_stops(logits, rows)
        tokens = logits.argmax(dim=-1)  # NaN counts as the largest
        finite = logits.gather(-1, tokens[:, None])[:, 0].isfinite()
        if logits is not given:
            finite &= given.amax(dim=-1).isfinite()
        drawn = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        for filtered in (False, True):  # unfiltered rows need no order
            chosen = [index for index in drawn if rows[index].params.filters is filtered]
            if chosen:
                params = [rows[index].params for index in chosen]
                uniform = column([self._uniform(rows[index]) for index in chosen], logits)[:, 0]
                places = place(np.array(chosen), logits.device)
                of_chosen = logits.index_select(0, places)
                weights = _probabilities(of_chosen, params)
                if filtered:
                    tokens.index_copy_(0, places, draw_filtered(of_chosen, weights, params, uniform))
                else:
                    tokens.index_copy_(0, places, invert(weights, uniform))
        return torch.where(finite, tokens, NO_TOKEN)

    def _uniform(self, row: SampleRow) -> float:
        if row.params.seed is None:
            return self._entropy.random()
        return seeded_uniform(row.params.seed, row.position)


def needs_logits(rows: Sequence[SampleRow]) -> bool:
    """Whether any row needs more than its largest logit: it is drawn, has logprobs, a constraint, penalties or biases,
    or its stop tokens may not come yet."""
    return any(
        row.params.temperature >= GREEDY_BELOW
        or row.params.logprobs is not None
        or row.params.grammar
        or row.params.adjusts_logits
        or _stops_early(row)
        for row in rows
    )


def greedy_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """What Sampler.sample() returns for rows that do not need their logits. logits, tokens: the largest logit of each
    row [rows], and its token."""
    return torch.where(logits.isfinite(), tokens, NO_TOKEN)


def seeded_uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) of 53 bits, a hash of seed (modulo 2^64) and position."""
    key = struct.pack("<QQ", seed % (1 << 64), position)
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _without_early_stops(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits [rows, vocabulary] without the stop tokens of rows below their min_tokens."""
    early = [index for index, row in enumerate(rows) if _stops_early(row)]
    if not early:
        return logits
    logits = logits.clone()
    for index in early:
        stops = [token for token in rows[index].params.stop_token_ids if 0 <= token < logits.shape[-1]]
        logits[index].index_fill_(0, place(np.array(stops, np.int64), logits.device), -torch.inf)
    return logits


def _stops_early(row: SampleRow) -> bool:
    """Whether a stop token now would come before the row's min_tokens."""
    return bool(row.params.stop_token_ids) and row.generated < row.params.min_tokens


def _probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return torch.softmax(logits.double() / column([entry.temperature for entry in params], logits), dim=-1)
