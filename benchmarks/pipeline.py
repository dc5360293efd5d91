"""Pipeline stages with a stub model, which takes a set time and no CPU: `python -m benchmarks.pipeline`.

Throughput against the ideal: one prompt of N chunks at P stages can take no less than (N + P - 1) turns of a stage,
and a full pipeline computes one chunk a turn. The share of the ideal is what control and hidden states leave of that.
Control latency: HTTP to first token of a prompt of one token on an idle server, less the set time of its stages; beside
it, what its hidden states alone take from process to process over as many bare hops (torch.distributed, Gloo).
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.report import console, print_table, prompt, run, spread
from headrace.server.launch.free_port import free_port
from headrace.server.launch.local_server import LocalServer

LAYERS = 16
VOCABULARY = 1000
HIDDEN = 64  # numbers per position; the stub's
BOUNCES = 500


def bare_hop() -> float:
    """Seconds that the hidden states of one position take to a stage that waits for them, and nothing else."""
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(2) as pool:
        return float(pool.starmap(_bounce, [(rank, port) for rank in (0, 1)], chunksize=1)[0])


def _bounce(rank: int, port: int) -> float:
    """One of two processes that play ball: seconds per throw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ball, times = torch.zeros(1, HIDDEN), []
    for _ in range(BOUNCES):
        started = time.perf_counter()
        for turn in (rank, 1 - rank):
            if turn == 0:
                dist.send(ball, 1 - rank)
            else:
                dist.recv(ball, 1 - rank)
        times.append((time.perf_counter() - started) / 2)
    dist.destroy_process_group()
    return statistics.median(times)


def seconds(server: LocalServer, ids: list[int]) -> float:
    """HTTP to first token; the KV goes nowhere."""
    started = time.perf_counter()
    body = {"prompt_token_ids": ids, "handoff": "none", "temperature": 0, "max_tokens": 1}
    answer = server.request("POST", "/v1/prefill", body)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started


def measure(stages: int, chunk: int, chunks: int, us_per_token: int, rounds: int, hop: float) -> tuple[str, ...]:
    """A row of the table. us_per_token: of one stage, whatever their number."""
    length = chunk * chunks
    model = f"stub:layers={LAYERS},us_per_token={us_per_token * stages},vocab={VOCABULARY},max_len={length + 16}"
    flags = ("--role", "prefill", "--model", model, "--pp", str(stages), "--chunk-tokens", str(chunk))
    server = LocalServer(*flags, "--no-prefix-cache", "--kv-pages", str(length // 16 + 16), "--threads", "1")
    try:
        with console.status(f"{stages} stages"):
            server.wait_ready()
            seconds(server, prompt(chunk, 0, VOCABULARY))
            turn = chunk * us_per_token * 1e-6
            full = [seconds(server, prompt(length, seed, VOCABULARY)) for seed in range(1, 1 + rounds)]
            idle = [seconds(server, [seed]) - stages * us_per_token * 1e-6 for seed in range(20)]
    finally:
        server.end()
        server.close()
    ideal = (chunks + stages - 1) * turn
    rate = [length / taken for taken in full]
    return (str(stages), spread(rate), f"{length / ideal:,.0f}", f"{ideal / statistics.median(full):.1%}",
            spread([1000 * taken for taken in idle]), f"{1000 * hop * (stages - 1):.1f}")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=32, help="chunks of the prompt")
    parser.add_argument("--us-per-token", type=int, default=100, help="microseconds that each stage takes for a token")
    parser.add_argument("--rounds", type=int, default=3)
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
