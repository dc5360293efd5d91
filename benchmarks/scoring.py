"""Items a second that a server scores behind one shared prefix, beside vLLM's on the same items.

`python -m benchmarks.scoring`; needs the environment that `make test-vllm` makes. Both serve SmolLM2 with as many
threads and in the same dtype, both have a prefix cache, and they take turns, each stopped while the other computes.
Where the kernel shares cores among sessions (sched_autogroup_enabled), run it with setsid: vLLM has its own, too.

Every round has a prefix and items of its own. Scores are compared between the two, and each of ours with the
prompt_logprobs of the same prompt and its label, which have to be equal bit for bit.
"""

import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.arguments import add_dtype, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_body, serving
from benchmarks.vllm_server import NAME, THREADS, Vllm, export_smollm2
from headrace.integrations.http_client import direct_client
from headrace.server.launch.local_server import LocalServer

LABELS = (5338, 1770)
CHECKED = 4
"""Items of a round whose scores are compared with prompt_logprobs."""


class Body(NamedTuple):
    """What is scored in a round."""

    query: list[int]
    items: list[list[int]]

    def fields(self, model: str) -> dict[str, Any]:
        """Of POST /generative_scoring."""
        labels = list(LABELS)
        return {
            "model": model, "query": self.query, "items": self.items, "label_token_ids": labels, "apply_softmax": False
        }  # fmt: skip


class Scored(NamedTuple):
    """The answer of a server."""

    items_s: float
    cpu_ms: float  # of all its processes, for each item: what others on the cores do not change much
    scores: list[float]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its children so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def score(client: httpx.Client, pid: int, body: Body) -> Scored:
    """Score by POST /generative_scoring. pid: of the server's first process."""
    started, used = time.perf_counter(), cpu_seconds(pid)
    answer = client.post("/generative_scoring", json=body.fields(NAME))
    took, used = time.perf_counter() - started, cpu_seconds(pid) - used
    assert answer.status_code == 200, answer.text
    count = len(body.items)
    return Scored(count / took, 1000 * used / count, [item["score"] for item in answer.json()["data"]])


def unequal(server: LocalServer, body: Body, scores: Sequence[float]) -> int:
    """Of the first scores, those that are not the probability by prompt_logprobs of the same prompt and label."""
    different = 0
    for item, found in zip(body.items[:CHECKED], scores, strict=False):
        ids = [*body.query, *item, LABELS[0]]
        answer = server.request(
            "POST", "/v1/prefill", prefill_body(ids, prompt_logprobs=0, prompt_logprobs_start=len(ids) - 1)
        )
        assert answer.status_code == 200, answer.text
        different += math.exp(answer.json()["prompt_logprobs"][-1]["logprob"]) != found
    return different


@contextmanager
def turn(send: Callable[[int], None]) -> Iterator[None]:
    """One of the two computes; the other is stopped. send: a signal to it."""
    send(signal.SIGCONT)
    time.sleep(0.5)
    yield
    send(signal.SIGSTOP)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("scoring", __doc__)
    add_dtype(parser)
    add_threads(parser)
    add_rounds(parser, 3)
    parser.add_argument("--prefix", type=int, default=512, metavar="TOKENS", help="tokens that all items share")
    parser.add_argument("--items", type=int, default=64, metavar="N", help="items of a body")
    parser.add_argument("--length", type=int, default=32, metavar="TOKENS", help="tokens of an item")
    given = parser.parse_args(arguments)
    threads = {**THREADS, "OMP_NUM_THREADS": str(given.threads)}
    flags = ("--role", "prefill", "--dtype", given.dtype, "--threads", str(given.threads))
    ours: list[Scored] = []
    theirs: list[Scored] = []
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        model = export_smollm2(Path(folder), given.dtype)
        vllm = Vllm(model, None, dtype=given.dtype, environment=threads)
        with closing(vllm), serving(*flags) as server, direct_client(base_url=server.url, timeout=600) as client:
            with console.status("starting vLLM"):
                vllm.wait_ready()
            vllm.signal(signal.SIGSTOP)
            for number in range(given.rounds + 1):  # the first one is warm-up
                body = _drawn(given.prefix, given.items, given.length, number)
                own = score(client, server.process.pid, body)
                different += unequal(server, body, own.scores)
                with turn(vllm.signal):
                    other = score(vllm.client, vllm.process.pid, body)
                if number:
                    ours.append(own)
                    theirs.append(other)
                console.print(
                    f"round {number}: {own.items_s:,.1f} and {other.items_s:,.1f} items/s, "
                    f"{own.cpu_ms:,.0f} and {other.cpu_ms:,.0f} ms of CPU each"
                )
    ratio = statistics.median(one.items_s / other.items_s for one, other in zip(ours, theirs, strict=True))
    apart = max(
        abs(math.log(one) - math.log(other))
        for own, others in zip(ours, theirs, strict=True)
        for one, other in zip(own.scores, others.scores, strict=True)
    )
    print_table(
        f"items/s, {given.items} items of {given.length} tokens behind {given.prefix}, {given.dtype}, "
        f"{given.threads} threads: median (range) of {given.rounds} rounds",
        ("Headrace", "vLLM", "ratio", "CPU ms an item", "vLLM", "logprobs apart", "unequal to prompt_logprobs"),
        [(
            spread([one.items_s for one in ours]), spread([other.items_s for other in theirs]), f"{ratio:.2f}",
            spread([one.cpu_ms for one in ours]), spread([other.cpu_ms for other in theirs]),
            f"{apart:.1e}", f"{different} of {(given.rounds + 1) * min(CHECKED, given.items)}",
        )],
    )  # fmt: skip
    return 1 if different else 0


def _drawn(prefix: int, items: int, length: int, number: int) -> Body:
    seed = 10_000 * (number + 1)
    return Body(prompt(prefix, seed), [prompt(length, seed + 1 + index) for index in range(items)])


if __name__ == "__main__":
    run(main)
