"""Time to first token in ms of a vLLM that loads its prompt's KV: from a Headrace prefill server through the connector
and through the gateway, and from another vLLM through NixlConnector.

`python -m benchmarks.vllm_decode`; needs the environments that `make test-vllm` makes, and runs in that with NIXL:
`.venv-nixl/bin/python -m benchmarks.vllm_decode`. Prompts are prefilled before the clock starts. The three take turns,
a prompt each, and their vLLMs are stopped while it is not their turn, since a NIXL worker keeps a core busy. vLLM also
computes prompts itself, which shows the state of the machine.
"""

import math
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arguments import add_dtype, add_lengths, add_rounds, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import first_event_ms
from benchmarks.vllm_server import INSTALLED, NAME, Vllm, export_smollm2, takes_by_nixl, takes_from_headrace
from headrace.server.launch.local_server import LocalServer

SETTLE_S = 0.5  # after vLLMs have been told to go on
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


def from_gateway(gateway: LocalServer) -> Prepare:
    """Prefills on a Headrace server behind a gateway, which has the KV then."""

    def prepare(ids: list[int]) -> dict[str, Any]:
        body = {"model": NAME, "prompt": ids, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        answer = gateway.request("POST", "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    return prepare


class Way(NamedTuple):
    """One way for KV into a vLLM."""

    name: str
    decode: Vllm
    prepare: Prepare
    others: tuple[Vllm, ...] = ()  # that take part
    ready: Callable[[], bool] = lambda: True  # whether prepare() can be called

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Its vLLMs run."""
        for server in (self.decode, *self.others):
            server.signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        while not self.ready():
            time.sleep(SETTLE_S)
        yield
        self.stop()

    def stop(self) -> None:
        """Its vLLMs get no processor until its next turn."""
        for server in (self.decode, *self.others):
            server.signal(signal.SIGSTOP)


class Rounds(NamedTuple):
    """What to measure."""

    lengths: Sequence[int]  # tokens of the prompts
    times: int  # measurements of each length
    alone: int  # of them, those in which vLLM computes the prompt itself, too


ALONE = "vLLM alone"
Latencies = dict[str, list[float]]
"""Time to first token of each round in ms, by way, and ALONE; of a way those rounds in which the KV was loaded."""


def measure(ways: Sequence[Way], rounds: Rounds) -> dict[int, Latencies]:
    """Latencies by prompt length."""
    results: dict[int, Latencies] = {}
    for length in rounds.lengths:
        found = results[length] = {name: [] for name in (*(way.name for way in ways), ALONE)}
        for number in range(rounds.times + 1):  # the first one is warm-up
            ids = prompt(length, 1000 * length + number)
            for way in ways:
                with way.turn():
                    before = way.decode.loaded_tokens()
                    took = first_token_ms(way.decode, ids, way.prepare(ids))
                    if way is ways[0] and 0 < number <= rounds.alone:
                        found[ALONE].append(first_token_ms(way.decode, ids, None))
                    time.sleep(1.0)  # the metric lags by a step
                    loaded = way.decode.loaded_tokens() - before
                    console.print(
                        f"{length:,} tokens, round {number}, {way.name}: {took:,.1f} ms, {loaded:,.0f} tokens loaded"
                    )
                    if number and loaded == length:
                        found[way.name].append(took)
    return results


@contextmanager
def started(model: Path, dtype: str) -> Iterator[list[Way]]:
    """The three ways, all of whose vLLMs are stopped."""
    flags = ("--role", "prefill", "--dtype", dtype, "--max-model-len", "4096", "--no-prefix-cache", "--threads", "1")
    with ExitStack() as stack, console.status("four vLLMs, a prefill server and a gateway"):
        transfers = (takes_from_headrace(), takes_by_nixl(), takes_by_nixl("kv_both"), takes_by_nixl("kv_both"))
        prefill = stack.enter_context(closing(LocalServer(*flags)))
        prefill.wait_ready()
        servers: list[Vllm] = []
        for number, transfer in enumerate(transfers):
            made = Vllm(model, transfer, dtype=dtype, modules=(INSTALLED,) if number == 0 else ())
            servers.append(stack.enter_context(closing(made)))
            made.wait_ready()
            if number != 1:
                made.signal(signal.SIGSTOP)
        connected, behind, first, second = servers
        decode = f"{behind.url}=127.0.0.1:{behind.ports.side_channel}"
        gateway = LocalServer("--decode", decode, "--prefill", prefill.url, command="gateway")
        stack.enter_context(closing(gateway)).wait_ready()
        ways = [
            Way("connector", connected, from_headrace(prefill)),
            Way("gateway", behind, from_gateway(gateway), ready=gateway.ready),
            Way("NixlConnector", second, from_vllm(first), (first,)),
        ]
        for way in ways:
            way.stop()
        yield ways


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
        with started(model, given.dtype) as ways:
            results = measure(ways, Rounds(given.lengths, given.rounds, given.alone))
    rows = []
    for length, found in results.items():
        medians = {name: statistics.median(column) if column else math.nan for name, column in found.items()}
        ratio = medians["gateway"] / medians["NixlConnector"]
        columns = (f"{spread(column)} of {len(column)}" if column else "none" for column in found.values())
        rows.append((f"{length:,}", *columns, f"{ratio:.2f}"))
    print_table(
        f"time to first token, ms, {given.dtype}: median (range) of those of {given.rounds} rounds whose KV was loaded",
        ("tokens", *results[given.lengths[0]], "gateway / Nixl"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
