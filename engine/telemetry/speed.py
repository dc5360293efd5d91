"""How long a stage takes for a prompt of some length, measured at its start: f(l) = a·l² + b·l + c seconds."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.engine.runner import Runner

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the chunk length
REQUEST = -2  # the scheduler counts from 0
REPEATS = 2

Cost = tuple[float, float, float]


def measure(
    runner: Runner, chunk_tokens: int, limit: int, *, first: bool, clock: Callable[[], float] = time.perf_counter
) -> Cost | None:
    """Compute prompts of several lengths, over whatever the pool holds, and fit their times.

    limit: positions in the longest sequence. first: whether this stage embeds tokens, rather than getting hidden
    states. None when there is no room for three lengths.
    """
    size = runner.geometry.page_size
    limit = min(limit, runner.pool.pages * size)
    lengths = sorted({length for share in LENGTHS if 0 < (length := int(share * chunk_tokens)) <= limit})
    if len(lengths) < 3:
        return None
    samples = []
    for length in lengths:
        row = PlanRow(REQUEST, 0, length, packed.pack(range(-(-length // size))), packed.pack([0] * length))
        kind = runner.hidden
        hidden = None if first else torch.zeros(length, kind.size, dtype=kind.dtype, device=kind.device)
        samples.append((length, min(_seconds(runner, row, hidden, clock) for _ in range(REPEATS))))
    runner.release(REQUEST)
    return fit(samples)


def fit(samples: Sequence[tuple[int, float]]) -> Cost:
    """Least squares over (tokens, seconds), each sample weighed by its inverse, with no coefficient below zero.

    Where the best fit has a negative one, the best of those without that term is taken.
    """
    lengths = np.array([float(length) for length, _ in samples])
    seconds = np.array([max(taken, 1e-9) for _, taken in samples])
    terms = np.stack((lengths**2, lengths, np.ones_like(lengths)), axis=1) / seconds[:, None]
    kept = [0, 1, 2]
    while kept:
        found = np.linalg.lstsq(terms[:, kept], np.ones_like(seconds), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int((found * terms[:, kept].max(axis=0)).argmin())]  # by what it does to the times
    cost = [0.0, 0.0, 0.0]
    for index, term in enumerate(kept):
        cost[term] = float(found[index])
    return cost[0], cost[1], cost[2]


def _seconds(runner: Runner, row: PlanRow, hidden: torch.Tensor | None, clock: Callable[[], float]) -> float:
    started = clock()
    runner.forward([row], hidden)
    if runner.hidden.device.type == "cuda":
        torch.cuda.synchronize(runner.hidden.device)
    return clock() - started
