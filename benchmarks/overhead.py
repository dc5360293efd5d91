"""What everything around the forward pass costs: `python -m benchmarks.overhead`.

Three measurements. An idle server with a stub model that takes no time, one request after the other, and where the
time goes. Requests/s of the same server by the number of clients. Both beside uvicorn with an empty route, the two
taking turns, with the client of this process (which has its share of the machine's cores). And prompts of a real model,
HTTP to first token, against the seconds that its stage computed.
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

import uvicorn
from starlette.types import Receive, Scope, Send

from benchmarks.report import console, print_table, prompt, run, spread
from headrace.server.launch.free_port import free_port
from headrace.server.launch.local_server import LocalServer

VOCABULARY = 1000
STUB = f"stub:us_per_token=0,max_len=4096,vocab={VOCABULARY}"
IDLE_TOKENS = 16
WARM_UP = 50
_COMPUTED = re.compile(r"^headrace_plan_duration_seconds_sum (\S+)$", re.MULTILINE)


class Connection:
    """A kept-alive HTTP connection that does as little as one can."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, body: bytes) -> bytes:
        """The body of the answer."""
        head = f"POST /v1/prefill HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        assert answer.startswith("HTTP/1.1 200"), answer
        length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
        assert length is not None, answer
        return await self._reader.readexactly(int(length[1]))

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    made = [Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


def body(ids: list[int]) -> bytes:
    """A prompt whose KV goes nowhere."""
    return json.dumps({"prompt_token_ids": ids, "handoff": "none", "temperature": 0, "max_tokens": 1}).encode()


class Answer(NamedTuple):
    """Milliseconds: by the client's clock, and those that the answer itself tells."""

    total: float
    queue: float = 0.0
    forward: float = 0.0


async def one_after_the_other(port: int, count: int) -> list[Answer]:
    """Requests on one connection."""
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
    """Of so many clients that each wait for their answer before they ask again."""
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


def computed(server: LocalServer) -> float:
    """Seconds that the (only) stage has spent on plans, by the record that comes with each of them."""
    match = _COMPUTED.search(server.request("GET", "/metrics").text)
    assert match is not None
    return float(match[1])


def idle(server: LocalServer, empty: int, rounds: int, count: int) -> None:
    """The time of a request and of its parts. empty: port of the empty route."""
    asyncio.run(one_after_the_other(server.port, WARM_UP))
    asyncio.run(one_after_the_other(empty, WARM_UP))
    ours: list[Answer] = []
    theirs: list[Answer] = []
    before = computed(server)
    for _ in range(rounds):
        ours += asyncio.run(one_after_the_other(server.port, count))
        theirs += asyncio.run(one_after_the_other(empty, count))
    stage = 1000 * (computed(server) - before) / len(ours)
    total, queue, forward = (statistics.median(column) for column in zip(*ours, strict=True))
    http = statistics.median(answer.total for answer in theirs)
    ends = sorted(answer.total for answer in ours)
    rows = [
        ("total", f"{total:.2f}", f"99% under {ends[int(0.99 * len(ends))]:.2f}"),
        ("uvicorn with an empty route, and the client", f"{http:.2f}", ""),
        ("front end, and the way to the scheduler and back", f"{total - http - queue - forward:.2f}", ""),
        ("queue", f"{queue:.2f}", ""),
        ("orders to the stage and back", f"{forward - stage:.2f}", ""),
        ("the stage's forward pass (the stub's arithmetic)", f"{stage:.2f}", ""),
    ]
    print_table(f"one request on an idle server, ms: median of {len(ours)}", ("part", "ms", ""), rows)


def throughput(server: LocalServer, empty: int, clients: Sequence[int], rounds: int, seconds: float) -> None:
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
        ("clients", "headrace, stub model", "uvicorn, empty route", "ratio"),
        rows,
    )


def share(model: str, dtype: str, threads: int, lengths: Sequence[int], rounds: int) -> None:
    """How much of the time of a prompt its stage does not compute."""
    flags = ("--role", "prefill", "--model", model, "--dtype", dtype, "--threads", str(threads), "--no-prefix-cache")
    server = LocalServer(*flags)
    rows = []
    try:
        with console.status(f"starting a server for {model}"):
            server.wait_ready()
        for length in lengths:
            with console.status(f"{length} tokens"):
                totals, around = [], []
                for seed in range(rounds):
                    request = body(prompt(length, seed))
                    before, started = computed(server), time.perf_counter()
                    asyncio.run(_post(server.port, request))
                    totals.append(time.perf_counter() - started)
                    around.append(totals[-1] - (computed(server) - before))
            shares = [100 * a / total for a, total in zip(around, totals, strict=True)]
            rows.append(
                (f"{length:,}", spread([1000 * each for each in totals]), spread([1000 * each for each in around]),
                 f"{statistics.median(shares):.2f}%")
            )  # fmt: skip
    finally:
        server.end()
        server.close()
    print_table(
        f"HTTP to first token, {model}, {dtype}, {threads} threads: median (range) of {rounds} rounds",
        ("tokens", "total, ms", "of it not computing, ms", "share"),
        rows,
    )


async def _post(port: int, request: bytes) -> None:
    async with connections(port, 1) as (connection,):
        await connection.post(request)


async def _empty(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and answers with an empty object."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def _listening(port: int) -> None:
    while True:
        try:
            async with connections(port, 1):
                return
        except OSError:
            await asyncio.sleep(0.05)


def around_a_stub(clients: Sequence[int], rounds: int, count: int, seconds: float) -> None:
    """The first two measurements."""
    server = LocalServer(
        "--role", "prefill", "--model", STUB, "--no-prefix-cache", "--kv-pages", "2048", "--threads", "1"
    )
    port = free_port()
    empty = subprocess.Popen([sys.executable, "-m", "benchmarks.overhead", "--empty-route", str(port)])
    try:
        with console.status("starting a server with a stub model, and an empty one"):
            server.wait_ready()
            asyncio.run(asyncio.wait_for(_listening(port), 30))
        with console.status("one request after the other"):
            idle(server, port, rounds, count)
        with console.status("several at once"):
            throughput(server, port, clients, rounds, seconds)
    finally:
        empty.terminate()
        empty.wait()
        server.end()
        server.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="of the third measurement")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], help="none: leave it out")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="one after the other, in each round")
    parser.add_argument("--seconds", type=float, default=3.0, help="of several clients, in each round")
    parser.add_argument("--empty-route", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.empty_route:
        uvicorn.run(_empty, port=given.empty_route, log_config=None, access_log=False, lifespan="off")
        return 0
    around_a_stub(given.clients, given.rounds, given.requests, given.seconds)
    if given.lengths:
        share(given.model, given.dtype, given.threads, given.lengths, given.rounds)
    return 0


if __name__ == "__main__":
    run(main)
