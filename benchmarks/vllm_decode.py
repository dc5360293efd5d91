"""Time to first token in ms of a stock vLLM that loads its prompt's KV, through Headrace's connector and NixlConnector.

`python -m benchmarks.vllm_decode`; needs the environment that `make test-vllm` makes. The KV comes from a Headrace
prefill server through the connector, or from another vLLM through NixlConnector; beside each, vLLM computes the prompt
itself, which shows the state of the machine. Prompts are prefilled before the clock starts. The two run one after the
other, since a NIXL worker keeps a core busy.
"""

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arguments import add_dtype, add_lengths, add_rounds, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import first_event_ms
from benchmarks.vllm_server import INSTALLED, NAME, Vllm, export_smollm2, takes_by_nixl, takes_from_headrace
from headrace.server.launch.local_server import LocalServer

Prepare = Callable[[list[int]], dict[str, Any]]  # prefills a prompt elsewhere; returns its kv_transfer_params


def first_token_ms(vllm: Vllm, ids: list[int], params: dict[str, Any] | None) -> float:
    """Milliseconds from the request to the first token of the stream."""
    body = {"model": NAME, "prompt": ids, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"cache_salt": secrets.token_hex(8)} | ({"kv_transfer_params": params} if params else {})
    started = time.perf_counter()
    with vllm.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        return first_event_ms(response.iter_lines(), started)


def from_headrace(prefill: LocalServer) -> Prepare:
    """Prefills on a Headrace server, which holds the KV."""
    control_port = prefill.request("GET", "/v1/handoff").json()["control_port"]

    def prepare(ids: list[int]) -> dict[str, Any]:
        ticket = secrets.token_hex(16)
        answer = prefill.request("POST", "/v1/prefill", {"prompt_token_ids": ids, "ticket": ticket, "handoff": "hold"})
        assert answer.status_code == 200, answer.text
        return {"do_remote_prefill": True, "ticket": ticket, "remote_host": "127.0.0.1", "remote_port": control_port}

    return prepare


def from_vllm(prefill: Vllm) -> Prepare:
    """Prefills on another vLLM."""

    def prepare(ids: list[int]) -> dict[str, Any]:
        answer = prefill.complete(ids, {"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1)
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    return prepare


class Rounds(NamedTuple):
    """What to measure."""

    lengths: Sequence[int]  # tokens of the prompts
    times: int  # measurements of each length
    alone: int  # of them, those in which vLLM computes the prompt itself, too


class Latencies(NamedTuple):
    """Time to first token of each round, in milliseconds."""

    fetched: list[float]  # with loaded KV
    alone: list[float]  # computed by vLLM itself


def measure(decode: Vllm, prepare: Prepare, rounds: Rounds) -> dict[int, Latencies]:
    """Latencies by prompt length."""
    results: dict[int, Latencies] = {}
    for length in rounds.lengths:
        found = results[length] = Latencies([], [])
        before = decode.loaded_tokens()
        for seed in range(rounds.times + 1):  # the first one is warm-up
            ids = prompt(length, 1000 * length + seed)
            found.fetched.append(first_token_ms(decode, ids, prepare(ids)))
            if 0 < seed <= rounds.alone:
                found.alone.append(first_token_ms(decode, ids, None))
            console.print(f"{length:,} tokens, round {seed}: {found.fetched[-1]:,.1f} ms")
        del found.fetched[0]
        time.sleep(2.0)  # the metric lags by a step
        loaded = decode.loaded_tokens() - before
        assert loaded == length * (rounds.times + 1), f"{loaded} tokens were loaded"
    return results


def through_connector(model: Path, dtype: str, rounds: Rounds) -> dict[int, Latencies]:
    """Latencies with KV from a Headrace prefill server."""
    flags = ("--role", "prefill", "--dtype", dtype, "--max-model-len", "4096", "--no-prefix-cache", "--threads", "1")
    with ExitStack() as stack, console.status("a Headrace prefill server and a vLLM with the connector"):
        prefill = stack.enter_context(closing(LocalServer(*flags)))
        decode = stack.enter_context(closing(Vllm(model, takes_from_headrace(), dtype=dtype, modules=(INSTALLED,))))
        prefill.wait_ready()
        decode.wait_ready()
        return measure(decode, from_headrace(prefill), rounds)


def through_nixl(model: Path, dtype: str, rounds: Rounds) -> dict[int, Latencies]:
    """Latencies with KV from another vLLM through NixlConnector."""
    with ExitStack() as stack, console.status("two vLLMs with NixlConnector"):
        servers = []
        for _ in range(2):
            server = Vllm(model, takes_by_nixl("kv_both"), dtype=dtype)
            servers.append(stack.enter_context(closing(server)))
        for server in servers:
            server.wait_ready()
        return measure(servers[1], from_vllm(servers[0]), rounds)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("vllm_decode", __doc__)
    add_dtype(parser, "bfloat16")
    add_rounds(parser, 5)
    parser.add_argument(
        "--alone", type=int, default=2, metavar="N", help="rounds in which vLLM also computes the prompt"
    )
    add_lengths(parser, 300, 2048)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = export_smollm2(Path(folder), given.dtype)
        rounds = Rounds(given.lengths, given.rounds, given.alone)
        ours = through_connector(model, given.dtype, rounds)
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
