"""Overhead around the forward pass: ms of a request on an idle server by part, requests/s, and share of a real prompt.

`python -m benchmarks.overhead` measures three things:

    an idle server with a stub model that takes no time, one request after the other: ms by part
    the same server with several clients: requests/s
    prompts of a real model, HTTP to first token: the time in which its stage does not compute

The first two are measured in turns with the HTTP server and an empty route, by a client in this process, which takes
its share of the machine's cores.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from benchmarks.arguments import add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import plan_seconds, prefill_body, serving
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import bind
from headrace.server.http.server import HttpServer
from headrace.server.launch.free_port import free_port
from headrace.server.launch.local_server import LocalServer

VOCABULARY = 1000
STUB = f"stub:us_per_token=0,max_len=4096,vocab={VOCABULARY}"
IDLE_TOKENS = 16
WARM_UP = 50  # requests


class Connection:
    """A minimal keep-alive HTTP client connection, so that the client costs little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Of asyncio.open_connection."""
        self._reader = reader
        self._writer = writer

    async def post(self, body: bytes) -> bytes:
        """POST /v1/prefill; returns the body of the answer."""
        head = f"POST /v1/prefill HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        assert answer.startswith("HTTP/1.1 200"), answer
        length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
        assert length is not None, answer
        return await self._reader.readexactly(int(length[1]))

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


@asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """So many connections to a loopback port, for the length of a with block."""
    made = [Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


def body(ids: list[int]) -> bytes:
    """Encoded body for a prompt whose KV is sent to no peer."""
    return json.dumps(prefill_body(ids)).encode()


class Answer(NamedTuple):
    """Milliseconds of one request."""

    total: float  # by the client's clock
    queue: float = 0.0  # by the answer's timing_ms
    forward: float = 0.0  # by the answer's timing_ms


async def sequential_requests(port: int, count: int) -> list[Answer]:
    """So many requests on one connection, one after the other."""
    answers = []
    async with connections(port, 1) as (connection,):
        for seed in range(count):
            request = body(prompt(IDLE_TOKENS, seed, VOCABULARY))
            started = time.perf_counter()
            content = await connection.post(request)
            total = 1000 * (time.perf_counter() - started)
            timing: dict[str, Any] = json.loads(content).get("timing_ms", {})
            answers.append(Answer(total, timing.get("queue", 0.0), timing.get("forward", 0.0)))
    return answers


async def requests_per_second(port: int, clients: int, seconds: float) -> float:
    """Requests per second of so many clients, each with one request at a time."""
    done = 0
    end = time.perf_counter() + seconds
    requests = [body(prompt(IDLE_TOKENS, seed, VOCABULARY)) for seed in range(256)]

    async def ask(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await connection.post(requests[done % len(requests)])
            done += 1

    async with connections(port, clients) as made:
        started = time.perf_counter()
        await asyncio.gather(*map(ask, made))
        return done / (time.perf_counter() - started)


def print_latency_by_part(server: LocalServer, empty: int, rounds: int, count: int) -> None:
    """Print ms of a request on an idle server, by part. empty: port of the empty route."""
    asyncio.run(sequential_requests(server.port, WARM_UP))
    asyncio.run(sequential_requests(empty, WARM_UP))
    ours: list[Answer] = []
    theirs: list[Answer] = []
    before = plan_seconds(server)
    for _ in range(rounds):
        ours += asyncio.run(sequential_requests(server.port, count))
        theirs += asyncio.run(sequential_requests(empty, count))
    stage = 1000 * (plan_seconds(server) - before) / len(ours)
    total, queue, forward = (statistics.median(column) for column in zip(*ours, strict=True))
    http = statistics.median(answer.total for answer in theirs)
    ends = sorted(answer.total for answer in ours)
    rows = [
        ("total", f"{total:.2f}", f"99% under {ends[int(0.99 * len(ends))]:.2f}"),
        ("HTTP with an empty route, and the client", f"{http:.2f}", ""),
        ("front end, and messages to the scheduler and back", f"{total - http - queue - forward:.2f}", ""),
        ("queue", f"{queue:.2f}", ""),
        ("orders to the stage and back", f"{forward - stage:.2f}", ""),
        ("the stage's forward pass (the stub's arithmetic)", f"{stage:.2f}", ""),
    ]
    print_table(f"one request on an idle server, ms: median of {len(ours)}", ("part", "ms", ""), rows)


def print_throughput(server: LocalServer, empty: int, clients: Sequence[int], rounds: int, seconds: float) -> None:
    """Print requests/s by number of clients. empty: port of the empty route."""
    rows = []
    for count in clients:
        pairs = []
        for _ in range(rounds):
            ours = asyncio.run(requests_per_second(server.port, count, seconds))
            pairs.append((ours, asyncio.run(requests_per_second(empty, count, seconds))))
        ratio = statistics.median(a / b for a, b in pairs)
        rows.append((str(count), spread([a for a, _ in pairs]), spread([b for _, b in pairs]), f"{ratio:.2f}"))
    print_table(
        f"requests/s, {IDLE_TOKENS} tokens each: median (range) of {rounds} rounds",
        ("clients", "headrace, stub model", "HTTP, empty route", "ratio"),
        rows,
    )


def print_share(model: str, dtype: str, threads: int, lengths: Sequence[int], rounds: int) -> None:
    """Print the share of a prompt's time in which the stage does not compute."""
    flags = ("--role", "prefill", "--model", model, "--dtype", dtype, "--threads", str(threads), "--no-prefix-cache")
    rows = []
    with serving(*flags, status=f"starting a server for {model}") as server:
        for length in lengths:
            with console.status(f"{length} tokens"):
                totals, around = [], []
                for seed in range(rounds):
                    request = body(prompt(length, seed))
                    before, started = plan_seconds(server), time.perf_counter()
                    asyncio.run(_post(server.port, request))
                    totals.append(time.perf_counter() - started)
                    around.append(totals[-1] - (plan_seconds(server) - before))
            shares = [100 * a / total for a, total in zip(around, totals, strict=True)]
            rows.append(
                (f"{length:,}", spread([1000 * each for each in totals]), spread([1000 * each for each in around]),
                 f"{statistics.median(shares):.2f}%")
            )  # fmt: skip
    print_table(
        f"HTTP to first token, {model}, {dtype}, {threads} threads: median (range) of {rounds} rounds",
        ("tokens", "total, ms", "of it not computing, ms", "share"),
        rows,
    )


async def _post(port: int, request: bytes) -> None:
    async with connections(port, 1) as (connection,):
        await connection.post(request)


async def _empty(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application: reads the body and answers with an empty object."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def _listening(port: int) -> None:
    """Wait until the port accepts connections."""
    while True:
        try:
            async with connections(port, 1):
                return
        except OSError:
            await asyncio.sleep(0.05)


def measure_with_stub(clients: Sequence[int], rounds: int, count: int, seconds: float) -> None:
    """The first two measurements. count: requests in each round; seconds: of each round with several clients."""
    flags = ("--role", "prefill", "--model", STUB, "--no-prefix-cache", "--kv-pages", "2048", "--threads", "1")
    with serving(*flags, status="starting a server with a stub model") as server:
        port = free_port()
        empty = subprocess.Popen([sys.executable, "-m", "benchmarks.overhead", "--empty-route", str(port)])
        try:
            with console.status("starting HTTP with an empty route"):
                asyncio.run(asyncio.wait_for(_listening(port), 30))
            with console.status("one request after the other"):
                print_latency_by_part(server, port, rounds, count)
            with console.status("several clients"):
                print_throughput(server, port, clients, rounds, seconds)
        finally:
            empty.terminate()
            empty.wait()


def main(arguments: Sequence[str]) -> int:
    """Print the three tables. Raises ServerFailed."""
    parser = make_parser("overhead", __doc__)
    add_rounds(parser, 3)
    first = parser.add_argument_group("stub model")
    first.add_argument("--requests", type=int, default=300, metavar="N", help="one after the other, in each round")
    first.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="numbers of clients")
    first.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of each round with several clients")
    real = parser.add_argument_group("real model")
    add_model(real)
    add_threads(real)
    real.add_argument(
        "--lengths", type=int, nargs="*", default=[512, 2048], metavar="TOKENS",
        help="tokens of the prompts; without any the real model is left out",
    )  # fmt: skip
    parser.add_argument("--empty-route", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.empty_route:
        server = HttpServer(_empty, HttpConnections(1000), keep_alive_s=60)
        asyncio.run(server.serve(bind("127.0.0.1", given.empty_route, "port")))
        return 0
    measure_with_stub(given.clients, given.rounds, given.requests, given.seconds)
    if given.lengths:
        print_share(given.model, given.dtype, given.threads, given.lengths, given.rounds)
    return 0


if __name__ == "__main__":
    run(main)
