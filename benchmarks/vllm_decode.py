"""Time to first token of a stock vLLM that takes its prompt's KV from elsewhere: `python -m benchmarks.vllm_decode`.

From a Headrace prefill server through the connector, from another vLLM through NixlConnector, and computed by vLLM
itself. The prompt is computed before the clock starts. The two ways run one after the other, since a NIXL worker keeps
a core busy; the plain vLLM beside each shows what the machine was like. Needs what `make test-vllm` sets up.
"""

import argparse
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.vllm_server import NAME, THREADS, Vllm, export_smollm2, takes_from_headrace
from headrace.server.launch.free_port import free_port
from headrace.server.launch.local_server import LocalServer

Prepare = Callable[[list[int]], dict[str, Any]]  # has a prompt computed elsewhere, and returns its kv_transfer_params


def first_token(vllm: Vllm, ids: list[int], params: dict[str, Any] | None) -> float:
    """Milliseconds from the request to the first token of the stream."""
    body = {"model": NAME, "prompt": ids, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"cache_salt": secrets.token_hex(8)} | ({"kv_transfer_params": params} if params else {})
    first: float | None = None
    started = time.perf_counter()
    with vllm.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():  # to the end, so that nothing of it runs into the next measurement
            if line.startswith("data: {"):
                first = first or 1000 * (time.perf_counter() - started)
    assert first is not None, "the stream ended without a token"
    return first


def from_headrace(prefill: LocalServer) -> Prepare:
    control_port = prefill.request("GET", "/v1/handoff").json()["control_port"]

    def prepare(ids: list[int]) -> dict[str, Any]:
        ticket = secrets.token_hex(16)
        answer = prefill.request("POST", "/v1/prefill", {"prompt_token_ids": ids, "ticket": ticket, "handoff": "hold"})
        assert answer.status_code == 200, answer.text
        return {"do_remote_prefill": True, "ticket": ticket, "remote_host": "127.0.0.1", "remote_port": control_port}

    return prepare


def from_vllm(prefill: Vllm) -> Prepare:
    def prepare(ids: list[int]) -> dict[str, Any]:
        answer = prefill.complete(ids, {"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1)
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    return prepare


class Rounds(NamedTuple):
    """lengths: of prompts, in tokens. times: measurements of each; the first `alone` of them also without KV."""

    lengths: Sequence[int]
    times: int
    alone: int


class Found(NamedTuple):
    """Milliseconds of each round, with KV from elsewhere and alone."""

    fetched: list[float]
    alone: list[float]


def measure(decode: Vllm, prepare: Prepare, rounds: Rounds) -> dict[int, Found]:
    """What was found for each length."""
    results: dict[int, Found] = {}
    for length in rounds.lengths:
        found = results[length] = Found([], [])
        before = decode.loaded_tokens()
        for seed in range(rounds.times + 1):  # the first one warms up
            ids = prompt(length, 1000 * length + seed)
            found.fetched.append(first_token(decode, ids, prepare(ids)))
            if 0 < seed <= rounds.alone:
                found.alone.append(first_token(decode, ids, None))
            console.print(f"{length:,} tokens, round {seed}: {found.fetched[-1]:,.1f} ms")
        del found.fetched[0]
        time.sleep(2.0)  # the metric is behind by a step
        came = decode.loaded_tokens() - before
        assert came == length * (rounds.times + 1), f"{came} tokens came from elsewhere"
    return results


def through_the_connector(model: Path, dtype: str, rounds: Rounds) -> dict[int, Found]:
    flags = ("--role", "prefill", "--dtype", dtype, "--max-model-len", "4096", "--no-prefix-cache", "--threads", "1")
    with ExitStack() as stack, console.status("a Headrace prefill server and a vLLM with the connector"):
        prefill = stack.enter_context(closing(LocalServer(*flags)))
        decode = stack.enter_context(closing(Vllm(model, takes_from_headrace(), dtype=dtype)))
        prefill.wait_ready()
        decode.wait_ready()
        return measure(decode, from_headrace(prefill), rounds)


def through_nixl(model: Path, dtype: str, rounds: Rounds) -> dict[int, Found]:
    with ExitStack() as stack, console.status("two vLLMs with NixlConnector"):
        servers = []
        for _ in range(2):
            transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            server = Vllm(model, transfer, dtype=dtype, environment={**THREADS, **channel})
            servers.append(stack.enter_context(closing(server)))
        for server in servers:
            server.wait_ready()
        return measure(servers[1], from_vllm(servers[0]), rounds)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_decode", description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=int, default=2, help="rounds in which vLLM computes the prompt itself, too")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 2048])
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = export_smollm2(Path(folder), given.dtype)
        rounds = Rounds(given.lengths, given.rounds, given.alone)
        ours = through_the_connector(model, given.dtype, rounds)
        theirs = through_nixl(model, given.dtype, rounds)
    rows = []
    for length in given.lengths:
        columns = (*ours[length], *theirs[length])
        ratio = statistics.median(ours[length].fetched) / statistics.median(theirs[length].fetched)
        rows.append((f"{length:,}", *(spread(column) if column else "-" for column in columns), f"{ratio:.2f}"))
    print_table(
        f"time to first token, ms, {given.dtype}: median (range) of {given.rounds} rounds",
        ("tokens", "headrace", "vLLM alone, then", "NixlConnector", "vLLM alone, then", "headrace / Nixl"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
