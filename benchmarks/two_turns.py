"""Turn two of a conversation on a prefill and a decode server: with the KV of turn one's answer back, and without.

    turn one   prompt ───────► answer          KV of the answer goes back (--kv-return), or does not
    turn two   prompt, answer, more ───────► first token

Two decode servers, of which one returns KV, share a prefill server and take turns with conversations of their own.
"""

import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec

from benchmarks.arguments import add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import first_event_ms, serving
from headrace.integrations.http_client import direct_client
from headrace.server.launch.local_server import LocalServer

PAGE_SIZE = 16
SETTLE_S = 20.0  # for a return to arrive


class Given(msgspec.Struct, frozen=True):
    """Lengths in tokens."""

    prompt: int
    answer: int
    more: int


class Turns(msgspec.Struct):
    """What was measured of turn two."""

    first_token_ms: list[float] = msgspec.field(default_factory=list)
    cached: list[int] = msgspec.field(default_factory=list)


def turn(http: httpx.Client, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """A turn, answered at once."""
    body = {
        "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return dict(http.post("/v1/completions", json=body).raise_for_status().json())


def second_turn(http: httpx.Client, ids: Sequence[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and tokens of the prompt that were cached where it was computed."""
    body = {
        "prompt": list(ids), "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    found: list[str] = []
    started = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body) as response:

        def lines() -> Any:
            for line in response.iter_lines():
                found.append(line)
                yield line

        milliseconds = first_event_ms(lines(), started)
    cached = re.findall(r'"cached_tokens":\s*(\d+)', "\n".join(found))
    return milliseconds, int(cached[-1]) if cached else 0


def counted(server: LocalServer, name: str) -> float:
    """A counter of a server."""
    match = re.search(rf"^headrace_{name} (\S+)$", server.request("GET", "/metrics").text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def settled(server: LocalServer, returns: int) -> None:
    """Wait until so many turns have come back."""
    deadline = time.monotonic() + SETTLE_S
    name = r'kv_returns_total\{result="taken"\}'
    while counted(server, name) < returns and time.monotonic() < deadline:
        time.sleep(0.05)


def converse(server: LocalServer, given: Given, seed: int, returns: int) -> tuple[float, int]:
    """Two turns of a new conversation; of the second one the time to first token, ms, and the cached tokens. returns:
    of the server in all once this one has come back; 0: it has none."""
    first = prompt(given.prompt, seed)
    with direct_client(base_url=server.url, timeout=600) as http:
        answer = turn(http, first, given.answer)["choices"][0]["token_ids"]
        if returns:
            settled(server, returns)
        else:
            time.sleep(0.5)
        return second_turn(http, [*first, *answer, *prompt(given.more, -seed)])


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError, ServerFailed."""
    parser = make_parser("two_turns", __doc__)
    add_model(parser)
    add_threads(parser)
    add_rounds(parser, 3)
    for name, tokens, what in (
        ("prompt", 1000, "the first prompt"),
        ("answer", 256, "its answer"),
        ("more", 50, "what the client adds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=tokens, metavar="TOKENS", help=f"tokens of {what}")
    options = parser.parse_args(arguments)
    given = Given(options.prompt, options.answer, options.more)
    pages = 8 * (given.prompt + given.answer + given.more) // PAGE_SIZE
    flags = ("--model", options.model, "--dtype", options.dtype, "--page-size", str(PAGE_SIZE),
             "--kv-pages", str(pages), "--threads", str(options.threads))  # fmt: skip
    found = {"without": Turns(), "with": Turns()}
    with ExitStack() as stack:
        prefill = stack.enter_context(serving("--role", "prefill", "--accept-return", "127.0.0.1", *flags))
        decode = ("--role", "decode", "--prefill", prefill.url, *flags)
        servers = {
            "without": stack.enter_context(serving(*decode)),
            "with": stack.enter_context(serving(*decode, "--kv-return")),
        }
        for name, server in servers.items():
            converse(server, given, 1 + (name == "with"), int(name == "with"))  # warm-up
        for number in range(options.rounds):
            for name, server in servers.items():
                with console.status(f"round {number + 1} of {options.rounds}, {name} returns"):
                    returns = 2 + number if name == "with" else 0
                    ms, cached = converse(server, given, 10 + 2 * number + (name == "with"), returns)
                    found[name].first_token_ms.append(ms)
                    found[name].cached.append(cached)
        moved = {
            name: counted(servers["with"], f"kv_{name}_total") / (options.rounds + 1)
            for name in ("returned_tokens", "returned_bytes", "return_seconds")
        }
    base = statistics.median(found["without"].first_token_ms)
    length = given.prompt + given.answer + given.more
    rows = [
        (f"{name} returns", spread(turns.cached), spread(turns.first_token_ms),
         f"{statistics.median(turns.first_token_ms) / base:.3f}")
        for name, turns in found.items()
    ]  # fmt: skip
    title = f"Turn two: {length:,} tokens, {given.prompt + given.answer:,} of turn one; median (range)"
    print_table(title, ("", "cached tokens", "first token, ms", "ratio"), rows)
    print(
        f"a return: {moved['returned_tokens']:,.0f} tokens, {moved['returned_bytes'] / 2**20:.1f} MiB in "
        f"{1000 * moved['return_seconds']:.1f} ms; of turn one "
        f"{(given.prompt + given.answer - 1) // PAGE_SIZE * PAGE_SIZE:,} tokens are in whole pages"
    )
    return 0


if __name__ == "__main__":
    run(main)
