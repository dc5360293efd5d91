"""Prefill cost of a stage, measured at its start: f(l) = a·l² + b·l + c seconds for a prompt of l tokens.

The scheduler sizes chunks by it: the attention of a chunk costs more, the more tokens came before it.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.engine.runner import Runner

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # prompts measured, in chunk lengths
REQUEST = -2  # the scheduler numbers requests from 0
REPEATS = 2  # per length; the faster one counts

Cost = tuple[float, float, float]  # (a, b, c)


def measure(
    runner: Runner, chunk_tokens: int, limit: int, *, first: bool, clock: Callable[[], float] = time.perf_counter
) -> Cost | None:
    """Time prompts of several lengths and fit the cost function; pages of the pool are overwritten.

    chunk_tokens: configured tokens per chunk. limit: positions in the longest sequence. first: this is the first stage,
    which embeds tokens instead of receiving hidden states. Returns None when fewer than three lengths fit.
    """
    geometry = runner.geometry
    limit = min(limit, runner.pool.pages * geometry.page_size)
    lengths = sorted({length for share in LENGTHS if 0 < (length := int(share * chunk_tokens)) <= limit})
    if len(lengths) < 3:
        return None
    samples = []
    for length in lengths:
        row = PlanRow(
            REQUEST, 0, length, packed.pack(range(geometry.pages_for(length))), packed.pack([0] * length), slot=0
        )
        form = runner.hidden_spec
        hidden = None if first else torch.zeros(length, form.size, dtype=form.dtype, device=form.device)
        samples.append((length, min(_seconds(runner, row, hidden, clock) for _ in range(REPEATS))))
    runner.release(REQUEST)
    return fit(samples)


def fit(samples: Sequence[tuple[int, float]]) -> Cost:
    """Fit (a, b, c) to (tokens, seconds) of prompts computed in one pass, see fit_terms()."""
    return fit_terms([(float(length) ** 2, float(length), seconds) for length, seconds in samples])


def fit_terms(samples: Sequence[tuple[float, float, float]]) -> Cost:
    """Fit (a, b, c) to passes of (squared tokens, tokens, seconds) by least squares of the relative error, with no
    coefficient below zero.

    A term whose coefficient comes out negative is dropped and the rest is fitted again.
    """
    seconds = np.array([max(taken, 1e-9) for _, _, taken in samples])
    columns = ([squared for squared, _, _ in samples], [tokens for _, tokens, _ in samples], [1.0] * len(samples))
    terms = np.array(columns).T / seconds[:, None]
    kept = [0, 1, 2]
    while kept:
        found = np.linalg.lstsq(terms[:, kept], np.ones_like(seconds), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int((found * terms[:, kept].max(axis=0)).argmin())]  # the most negative share of a time
    cost = [0.0, 0.0, 0.0]
    for index, term in enumerate(kept):
        cost[term] = float(found[index])
    return cost[0], cost[1], cost[2]


def _seconds(runner: Runner, row: PlanRow, hidden: torch.Tensor | None, clock: Callable[[], float]) -> float:
    started = clock()
    runner.forward([row], hidden)
    if runner.hidden_spec.device.type == "cuda":
        torch.cuda.synchronize(runner.hidden_spec.device)
    return clock() - started
