"""How long one request body holds up the front end, or its answer: the longest wait of another client meanwhile.

`python -m benchmarks.body_stalls` starts a server with a model that computes nothing and sends it the bodies that take
longest to read, one at a time, each several times. Another process asks GET /health all the time, over one connection.
"""

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import print_table, run
from benchmarks.server import serving
from headrace.integrations.http_client import direct_client

MODEL = ("--model", "stub:layers=1,hidden=32,max_len=131072", "--kv-pages", "8192")
LIMIT = (16 << 20) - 1024
PAUSE_S = 0.002


def bodies() -> dict[str, tuple[str, bytes]]:
    """Route and body, by what is in it."""
    ids = LIMIT // 24 - 1

    def body(**fields: object) -> bytes:
        return json.dumps(fields, separators=(",", ":")).encode()

    texts = LIMIT // 128 - 64
    return {
        "a small prompt": ("/v1/completions", body(prompt="x", max_tokens=1)),
        "token ids, one prompt": ("/v1/completions", body(prompt=[151] * ids)),
        "token ids, and a field of others": ("/v1/completions", body(prompt=[151] * ids, frequency_penalty=0)),
        "token ids, no end": ("/v1/completions", body(prompt=[151] * ids)[:-2]),
        "a text": ("/v1/completions", body(prompt="a" * LIMIT)),
        "a text of escapes": ("/v1/completions", b'{"prompt":"%s"}' % (b"\\u00e9" * (LIMIT // 6))),
        "many texts": ("/v1/completions", body(prompt=["ab"] * texts)),
        "many stop strings": ("/v1/completions", body(prompt="x", stop=[f"s{i}" for i in range(texts)])),
        "too many texts": ("/v1/completions", body(prompt=["ab"] * (LIMIT // 5))),
        "messages": ("/v1/chat/completions", body(messages=[{"role": "user", "content": "x"}] * 8000, max_tokens=1)),
        "empty lists": ("/v1/completions", b'{"prompt":[%s]}' % b",".join([b"[]"] * (LIMIT // 3))),
        "deep lists": ("/v1/completions", b"[" * LIMIT),
        "a schema": ("/v1/completions", body(prompt="x", response_format=_schema(12_000))),
        "prompt logprobs": ("/v1/completions", body(prompt=[5] * 60_000, max_tokens=1, prompt_logprobs=20)),
        "text to tokenize": ("/tokenize", body(prompt="a b " * (LIMIT // 4))),
    }


def _schema(properties: int) -> dict[str, object]:
    fields = {f"field{number}": {"type": "string"} for number in range(properties)}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": fields}}}


def ask(url: str, pipe: Connection) -> None:
    """Ask all the time. Answers each word of the pipe with the longest wait in seconds since the last one."""
    worst = 0.0
    with direct_client(base_url=url, timeout=60) as http:
        while True:
            if pipe.poll():
                if pipe.recv() is None:
                    return
                pipe.send(worst)
                worst = 0.0
            started = time.perf_counter()
            http.get("/health")
            worst = max(worst, time.perf_counter() - started)
            time.sleep(PAUSE_S)


@contextmanager
def other_client(url: str) -> Iterator[Connection]:
    """A process that asks."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ask, args=(url, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def worst_of(pipe: Connection) -> float:
    """The longest wait since this was called last."""
    pipe.send("?")
    waited: float = pipe.recv()
    return waited


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table."""
    parser = make_parser("body_stalls", __doc__)
    add_rounds(parser, 5)
    args = parser.parse_args(argv)
    rows = []
    with serving("--role", "colocated", *MODEL) as server, other_client(server.url) as pipe:
        worst_of(pipe)
        threading.Event().wait(2.0)
        rows.append(["nothing", "", "", f"{1000 * worst_of(pipe):.0f}"])
        for name, (route, body) in bodies().items():
            waits, status, seconds = [], 0, 0.0
            for _ in range(args.rounds):
                worst_of(pipe)
                started = time.perf_counter()
                with direct_client(base_url=server.url, timeout=60) as http:
                    answer = http.post(route, content=body, headers={"content-type": "application/json"})
                status, seconds = answer.status_code, time.perf_counter() - started
                waits.append(worst_of(pipe))
            rows.append([name, str(status), f"{seconds:.2f}", " ".join(f"{1000 * wait:.0f}" for wait in sorted(waits))])
    print_table("Bodies of up to 16 MiB", ("body", "status", "answered after s", "others wait, ms"), rows)
    return 0


if __name__ == "__main__":
    run(main)
