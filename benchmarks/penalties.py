"""Penalties: time to sample a batch whose rows have penalties or biases, beside the same batch without.

`python -m benchmarks.penalties`. Sampling alone, from random logits, without a model: step by step, each kind of
parameters in turn, so that the requests of each have generated as many tokens. The prompts have random tokens.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from benchmarks.arguments import add_threads, make_parser
from benchmarks.report import print_table, run
from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import SamplingParams, TokenHistory
from headrace.engine.sampling.adjusted import LogitAdjustments
from headrace.engine.sampling.sampler import Sampler, SampleRow

PLAIN = SamplingParams(temperature=1.0, seed=1)
KINDS = {
    "none": PLAIN,
    "presence and frequency": replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.5),
    "repetition": replace(PLAIN, repetition_penalty=1.2),
    "all three": replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
    "300 biases": replace(PLAIN, logit_bias=tuple((token, 1.0) for token in range(300))),
}


class Batch:
    """Requests with the same parameters but for their seeds, sampled step by step."""

    def __init__(self, params: SamplingParams, rows: int, prompt: int, vocabulary: int) -> None:
        self._params = [replace(params, seed=number) for number in range(rows)]
        self._prompts = [pack(random.Random(row).choices(range(vocabulary), k=prompt)) for row in range(rows)]
        self._adjustments = LogitAdjustments()
        self._sampler = Sampler(random.Random(0))
        self._steps = 0

    def step(self, logits: torch.Tensor) -> float:
        """Sample a token for each; returns the seconds that it took."""
        history = [TokenHistory(prompt) for prompt in self._prompts] if not self._steps else [None] * len(self._prompts)
        rows = [
            PlanRow(number, self._steps, 1, b"", sample=params, history=history[number])
            for number, params in enumerate(self._params)
        ]
        started = time.perf_counter()
        wanted = [SampleRow(params, self._steps, self._steps) for params in self._params]
        tokens = self._sampler.sample(self._adjustments.adjust(logits, rows), wanted).tolist()
        self._adjustments.accept([SampledToken(number, token) for number, token in enumerate(tokens)])
        self._steps += 1
        return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("penalties", __doc__)
    add_threads(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="rows of a batch")
    parser.add_argument("--vocabulary", type=int, default=49152, metavar="N", help="logits of a row")
    parser.add_argument("--prompt", type=int, default=2000, metavar="N", help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="tokens that each request generates")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as stages do
    for count in given.rows:
        for way, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            batches = {
                name: Batch(replace(params, temperature=temperature), count, given.prompt, given.vocabulary)
                for name, params in KINDS.items()
            }
            times: dict[str, list[float]] = {name: [] for name in batches}
            for step in range(given.steps):
                logits = torch.randn(count, given.vocabulary, generator=torch.Generator().manual_seed(step))
                names = deque(batches)
                names.rotate(step)  # the first one has no memory to use again
                for name in names:
                    times[name].append(batches[name].step(logits))
            plain = statistics.median(times["none"])
            rows = [
                (
                    name,
                    f"{1e3 * statistics.median(found):.2f}",
                    f"{1e3 * min(found):.2f}",
                    f"{1e3 * (statistics.median(found) - plain):+.2f}",
                )
                for name, found in times.items()
            ]
            title = f"{count} rows of {given.vocabulary:,} logits, {way}; prompts of {given.prompt:,} tokens"
            print_table(title, ("parameters", "ms, median", "least", "beside none"), rows)
    return 0


if __name__ == "__main__":
    run(main)
