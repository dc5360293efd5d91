"""Time to first token of short prompts that arrive while a long one is being computed, beside what each takes alone.

    long   ├──────── 100,000 tokens ────────┤      time beside that of the long prompt alone
    short      ├┤      ├┤    ├┤      ├┤            time to first token beside that of a short prompt alone

The stub model takes about what Llama 3 70B takes on 8 H100; `--model smollm2 --long 8000` measures a real one. One
server for each policy; they take turns.
"""

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from benchmarks.arguments import add_dtype, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_seconds, serving
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.model.stub import is_stub
from headrace.server.launch.local_server import LocalServer

STUB = "stub:us_per_token=36,ps_per_token_squared=330,us_per_plan=8000"
STUB_VOCABULARY = 256
PAGE_SIZE = 16
WARM_UP = 3  # short prompts before the first measurement
HEADROOM = 64  # tokens beyond the longest prompt
FIRST, LAST = 0.1, 0.8  # of the long prompt's own time, between which short ones arrive
_WAITS = "Under srpt a short one waits for half of one, as a rule, and for its own, which is not filled up."


class Times(msgspec.Struct):
    """Seconds measured on one server."""

    short_alone: list[float] = msgspec.field(default_factory=list)
    short_behind: list[float] = msgspec.field(default_factory=list)
    long_alone: list[float] = msgspec.field(default_factory=list)
    long_beside: list[float] = msgspec.field(default_factory=list)


class Prompts:
    """Prompts that share no prefix."""

    def __init__(self, short: int, long: int, vocabulary: int) -> None:
        self._short, self._long, self._vocabulary = short, long, vocabulary
        self._seed = 0

    def short(self) -> list[int]:
        """The next short prompt."""
        return self._next(self._short)

    def long(self) -> list[int]:
        """The next long prompt."""
        return self._next(self._long)

    def _next(self, tokens: int) -> list[int]:
        self._seed += 1
        return prompt(tokens, self._seed, self._vocabulary)


def measure(server: LocalServer, prompts: Prompts, arrivals: Sequence[float], times: Times) -> None:
    """One round: short ones and a long one alone, then both. arrivals: when short ones arrive, as shares of the time
    that the long one takes alone."""
    times.short_alone += [prefill_seconds(server, prompts.short()) for _ in arrivals]
    alone = prefill_seconds(server, prompts.long())
    times.long_alone.append(alone)
    with ThreadPoolExecutor(1 + len(arrivals)) as pool:
        began = time.perf_counter()
        long = pool.submit(prefill_seconds, server, prompts.long())
        short = []
        for arrival in arrivals:
            time.sleep(max(0.0, began + arrival * alone - time.perf_counter()))
            short.append(pool.submit(prefill_seconds, server, prompts.short()))
        times.short_behind += [future.result() for future in short]
        times.long_beside.append(long.result())


def _row(policy: str, times: Times) -> tuple[str, ...]:
    def ms(values: Sequence[float]) -> str:
        return spread([1000 * value for value in values])

    def ratio(values: Sequence[float], alone: Sequence[float]) -> str:
        return f"{statistics.median(values) / statistics.median(alone):.3g}"

    return (
        policy,
        ms(times.short_alone),
        ms(times.short_behind),
        ratio(times.short_behind, times.short_alone),
        ms(times.long_alone),
        ms(times.long_beside),
        f"{statistics.median(times.long_beside) / statistics.median(times.long_alone):.3f}",
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError, ServerFailed."""
    parser = make_parser("short_behind_long", __doc__)
    parser.add_argument("--model", default=STUB, help="stub:..., or as in headrace serve")
    add_dtype(parser)
    add_threads(parser)
    parser.add_argument("--short", type=int, default=100, metavar="TOKENS", help="tokens of the short prompts")
    parser.add_argument("--long", type=int, default=100_000, metavar="TOKENS", help="tokens of the long prompts")
    parser.add_argument("--count", type=int, default=4, metavar="N", help="short prompts behind each long one")
    add_rounds(parser, 3)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "srpt"], metavar="NAME", help="policies to compare")
    parser.add_argument("--chunk-tokens", type=int, default=512, metavar="N", help="as in headrace serve")
    parser.add_argument("--chunking", default="fixed", help="as in headrace serve")
    parser.add_argument("--depth", type=int, default=1, metavar="N", help="--pipeline-depth of the servers")
    given = parser.parse_args(arguments)
    stub = is_stub(given.model)
    prompts = Prompts(given.short, given.long, STUB_VOCABULARY if stub else 40_000)
    longest = given.long + HEADROOM
    pages = (longest + (given.count + 1) * (given.short + PAGE_SIZE)) // PAGE_SIZE + 1
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--kv-pages", str(pages),
             "--page-size", str(PAGE_SIZE), "--max-model-len", str(longest), "--chunk-tokens", str(given.chunk_tokens),
             "--chunking", given.chunking, "--pipeline-depth", str(given.depth), "--max-queued-tokens", "100000000",
             "--threads", "1" if stub else str(given.threads))  # fmt: skip
    draw = random.Random(1)
    times = {policy: Times() for policy in given.policies}
    with ExitStack() as stack:
        servers = {policy: stack.enter_context(serving(*flags, "--policy", policy)) for policy in given.policies}
        for server in servers.values():
            for _ in range(WARM_UP):
                prefill_seconds(server, prompts.short())
        for number in range(given.rounds):
            arrivals = sorted(draw.uniform(FIRST, LAST) for _ in range(given.count))
            for policy, server in servers.items():
                with console.status(f"round {number + 1} of {given.rounds}: {policy}"):
                    measure(server, prompts, arrivals, times[policy])
    columns = ("policy", "short alone, ms", "behind long, ms", "ratio", "long alone, ms", "beside short, ms", "ratio")
    title = f"{given.short} tokens behind {given.long:,}; median (range)"
    print_table(title, columns, [_row(policy, each) for policy, each in times.items()])
    passes = ceil_div(given.long, given.chunk_tokens)
    mean_ms = 1000 * min(statistics.median(each.long_alone) for each in times.values()) / passes
    console.print(f"{passes} forward passes of a long prompt, {mean_ms:,.1f} ms each. {_WAITS}")
    return 0


if __name__ == "__main__":
    run(main)
