"""Pipeline stages with a stub model: prefill tokens/s as a share of the ideal, and idle latency in ms.

`python -m benchmarks.pipeline`. The stub model takes a configured time and no CPU. Ideal: one prompt of N chunks on P
stages takes (N + P - 1) times the time of a chunk on a stage. The share of the ideal shows the cost of control messages
and hidden states. Idle latency: HTTP to first token of a prompt of one token, minus the configured time of its stages;
beside it the time of as many bare hops of hidden states from process to process (torch.distributed, Gloo).
"""

import multiprocessing
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_seconds, serving
from headrace.server.launch.free_port import free_port

LAYERS = 16
VOCABULARY = 1000
HIDDEN = 64  # hidden size of the stub model
BOUNCES = 500  # round trips of bare_hop()


def bare_hop() -> float:
    """Seconds that the hidden states of one position take to another process that waits for them."""
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(2) as pool:
        return float(pool.starmap(_bounce, [(rank, port) for rank in (0, 1)], chunksize=1)[0])


def _bounce(rank: int, port: int) -> float:
    """One of two processes that send a tensor back and forth; returns the median seconds per hop."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor, times = torch.zeros(1, HIDDEN), []
    for _ in range(BOUNCES):
        started = time.perf_counter()
        for turn in (rank, 1 - rank):
            if turn == 0:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
        times.append((time.perf_counter() - started) / 2)
    dist.destroy_process_group()
    return statistics.median(times)


def measure(stages: int, chunk: int, chunks: int, us_per_token: int, rounds: int, hop: float) -> tuple[str, ...]:
    """A row of the table. chunk: tokens of a chunk; us_per_token: of one stage; hop: seconds of a bare hop."""
    length = chunk * chunks
    model = f"stub:layers={LAYERS},us_per_token={us_per_token * stages},vocab={VOCABULARY},max_len={length + 16}"
    flags = ("--role", "prefill", "--model", model, "--pp", str(stages), "--chunk-tokens", str(chunk))
    limits = ("--no-prefix-cache", "--kv-pages", str(length // 16 + 16), "--threads", "1")
    with (
        serving(*flags, *limits, status=f"starting {stages} stages") as server,
        console.status(f"{stages} stages"),
    ):
        prefill_seconds(server, prompt(chunk, 0, VOCABULARY))  # warm-up
        full = [prefill_seconds(server, prompt(length, seed, VOCABULARY)) for seed in range(1, 1 + rounds)]
        idle = [prefill_seconds(server, [seed]) - stages * us_per_token * 1e-6 for seed in range(20)]
    ideal = (chunks + stages - 1) * chunk * us_per_token * 1e-6
    rate = [length / taken for taken in full]
    return (str(stages), spread(rate), f"{length / ideal:,.0f}", f"{ideal / statistics.median(full):.1%}",
            spread([1000 * taken for taken in idle]), f"{1000 * hop * (stages - 1):.1f}")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ServerFailed."""
    parser = make_parser("pipeline", __doc__)
    parser.add_argument(
        "--stages", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="numbers of stages"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512, metavar="TOKENS", help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=32, metavar="N", help="chunks of the prompt")
    parser.add_argument("--us-per-token", type=int, default=100, metavar="US", help="microseconds per token and stage")
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    hop = bare_hop()
    rows = [
        measure(stages, given.chunk_tokens, given.chunks, given.us_per_token, given.rounds, hop)
        for stages in given.stages
    ]
    print_table(
        f"one prompt of {given.chunks} chunks, {given.chunk_tokens * given.us_per_token / 1000:g} ms each on a stage: "
        f"median (range) of {given.rounds} rounds",
        ("stages", "tokens/s", "ideal", "share of ideal", "idle latency, ms", "bare hops, ms"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
