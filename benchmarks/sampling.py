"""Filters of sampling: time to draw from the first ranks of the vocabulary, beside putting all of it in order.

`python -m benchmarks.sampling`. Sampling alone, from random logits, without a model: both ways draw from the same
logits in turn, in so many rounds, and have to draw the same tokens; times are of the CPU, and medians of a round.
Logits are normally distributed: times 3 or 5 they are as peaked as those of language models, times 1 flat, so that
top_p needs most of the vocabulary.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.arguments import add_threads, make_parser
from benchmarks.report import print_table, run
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.sampling import sampler as sampling
from headrace.engine.sampling.filtered import column, draw_filtered, invert
from headrace.engine.sampling.sampler import Sampler, SampleRow

KINDS: dict[str, dict[str, Any]] = {
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}


def draw_from_all(
    logits: torch.Tensor, _probabilities: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor
) -> torch.Tensor:
    """draw_filtered() as it was: the whole vocabulary is put in order."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    scaled = ordered.double() / column([entry.temperature for entry in params], logits)
    weights = torch.softmax(scaled, dim=-1)
    keep = weights >= column([entry.min_p for entry in params], logits) * weights[:, :1]
    keep &= torch.arange(logits.shape[-1]) < column([entry.top_k or logits.shape[-1] for entry in params], logits)
    weights = weights.masked_fill(~keep, 0.0)
    weights /= weights.sum(dim=-1, keepdim=True)
    before = weights.cumsum(dim=-1) - weights
    top_p = column([entry.top_p for entry in params], logits)
    keep = (before < top_p) | (top_p >= 1.0)
    keep[:, 0] = True
    choice = invert(weights.masked_fill(~keep, 0.0), uniform)
    return ids.gather(-1, choice[:, None])[:, 0]


def measure(logits: torch.Tensor, rows: Sequence[SampleRow], whole: bool) -> tuple[float, list[int]]:
    """CPU seconds to sample a token for each row, and the tokens."""
    sampler = Sampler(random.Random(0))
    draw = draw_from_all if whole else draw_filtered
    with (
        patch.object(sampling, "draw_filtered", draw),
        patch.object(sampling, "_probabilities", (lambda *_: torch.empty(0)) if whole else sampling._probabilities),
    ):
        started = time.process_time()
        tokens = sampler.sample(logits, rows).tolist()
        return time.process_time() - started, tokens


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("sampling", __doc__)
    add_threads(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="rows of a batch")
    parser.add_argument("--vocabulary", type=int, default=49152, metavar="N", help="logits of a row")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="batches of a round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as stages do
    for count in given.rows:
        for scale in (5.0, 3.0, 1.0):
            table = []
            for name, fields in KINDS.items():
                params = [SamplingParams(temperature=1.0, seed=number, **fields) for number in range(count)]
                medians: list[list[float]] = [[], []]
                for turn in range(given.rounds):
                    times: list[list[float]] = [[], []]
                    for step in range(given.steps):
                        generator = torch.Generator().manual_seed(turn * given.steps + step)
                        logits = torch.randn(count, given.vocabulary, generator=generator) * scale
                        rows = [SampleRow(each, step, step) for each in params]
                        found = {whole: measure(logits, rows, whole) for whole in (step % 2 == 0, step % 2 == 1)}
                        assert found[True][1] == found[False][1], "both ways draw the same tokens"
                        for whole, (seconds, _) in found.items():
                            times[whole].append(seconds)
                    for way, each in enumerate(times):
                        medians[way].append(1e3 * statistics.median(each))
                ratios = [whole / ranked for ranked, whole in zip(*medians, strict=True)]
                cells = (" ".join(f"{value:.2f}" for value in each) for each in (medians[1], medians[0]))
                table.append((name, *cells, " ".join(f"{ratio:.1f}" for ratio in ratios)))
            title = f"{count} rows of {given.vocabulary:,} logits, normally distributed times {scale:g}; each round"
            print_table(title, ("filters", "ms, all in order", "ms, first ranks", "ratio"), table)
    return 0


if __name__ == "__main__":
    run(main)
