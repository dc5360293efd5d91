"""`headrace demo`: disaggregated prefill on this machine, with real servers.

Starts a prefill and a decode server on free loopback ports, sends four prompts at once to the decode server, shows
the prefill's progress and the texts as they come, then runs the same prompts on one colocated server and compares.
Whatever goes wrong ends in one sentence, and no server stays behind.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.core.config import Config, ModelConfig
from headrace.core.runtime.output import printable_lines
from headrace.core.runtime.rate_limit import printable
from headrace.core.runtime.signals import ending
from headrace.integrations.http_client import direct_async_client
from headrace.server.config.load import load
from headrace.server.config.resolve import resolve
from headrace.server.launch.local_server import LocalServer, ServerFailed

MAX_TOKENS = 48
LONG_TEXT = "adventure.txt"
LONG_TEXT_CHARACTERS = 4000  # of it, up to the next paragraph: about 1,000 tokens
LONGEST_TOKENS = 8192  # of a prompt and its answer, where the model allows as many
KV_PAGES = 640  # of 16 tokens: room for all four
CHUNK_TOKENS = 256  # so that progress shows, and the short prompts do not wait for the long one
SILENCE_S = 120.0  # of a server that has been asked something
FAILED, INTERRUPTED = 1, 130
EXACT = "the pair's texts have to equal those of one server"
INEXACT = "the pair's texts may differ from those of one server: only the CPU in float32 or bfloat16 is reproducible"
LAST_MOMENT_S = 2.0
# What a server that ends early has said about it: a mistake, or the line of a log.
_COMPLAINT = re.compile(r"headrace: |\d[\d-]+ [\d:,]+ ERROR ")


class DemoFailed(Exception):
    """A server ended, responded with an error, or did not respond."""


@dataclass
class Conversation:
    """One prompt, its progress and its result."""

    name: str
    prompt: str
    phase: str = "sent"
    text: str = ""
    started_s: float = 0.0
    first_token_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


def conversations() -> list[Conversation]:
    """The four prompts: three short ones, whose texts come first, and one long real text."""
    text = (files("headrace.server") / "data" / LONG_TEXT).read_text(encoding="utf-8")
    story = text[: text.index("\n\n", LONG_TEXT_CHARACTERS)]
    return [
        Conversation("physics", "Explain in two sentences why the sky is blue."),
        Conversation("code", "Write a Python function that returns the n-th Fibonacci number."),
        Conversation("capital", "What is the capital of France, and which river runs through it?"),
        Conversation("a story", f"{story}\n\nIn two sentences: whom does Alice follow, and what happens to her?"),
    ]


def main(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the demonstration. Returns 0 when all texts have come, no checksum failed and, where results are
    reproducible, every text equals the colocated one. Raises ConfigError for a model or a dtype that does not work."""
    config = resolve(load({"model": arguments.model, "dtype": arguments.dtype}, environ)).config
    console = Console()
    servers: list[LocalServer] = []
    failure = ""
    try:
        return asyncio.run(_demo(console, config, servers))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; the servers are stopped")
        return INTERRUPTED
    except (ServerFailed, DemoFailed) as error:
        failure = str(error).partition(":\n")[0]  # without the log
    except Exception as error:  # a traceback would tell its reader nothing
        failure = f"{type(error).__name__}: {error}"
    finally:
        for server in servers:
            server.close()
    console.print(f"failed: {printable_lines(failure)}", style="red", markup=False, highlight=False, soft_wrap=True)
    return FAILED


async def _demo(console: Console, config: Config, servers: list[LocalServer]) -> int:
    """servers: all that are started are added."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in ending():
        loop.add_signal_handler(number, task.cancel)

    def start(role: str, threads: int, *flags: str) -> LocalServer:
        common = _flags(config.model, threads)
        servers.append(LocalServer("--role", role, *common, *flags))
        return servers[-1]

    cores = max(1, config.engine.threads - 1)  # one is left for the decode server, and for what computes nothing
    exact = config.model.device == "cpu" and config.model.dtype in ("float32", "bfloat16")
    console.print(f"{config.model.model} in {config.model.dtype}: {EXACT if exact else INEXACT}", highlight=False)
    console.print("[bold]1.[/] a prefill server and a decode server")
    prefill = start("prefill", cores)
    decode = start("decode", 1, "--prefill", prefill.url)
    async with _running(console, {"prefill": prefill, "decode": decode}):
        handed = conversations()
        console.print("[bold]2.[/] four prompts to the decode server, which gets their KV from the other one")
        await _run_all(console, decode.url, handed)
        _stop_if_cancelled(task)
        failures = await _checksum_failures(decode.url)
    console.print("[bold]3.[/] the same prompts on one colocated server")
    colocated = start("colocated", cores)
    async with _running(console, {"colocated": colocated}):
        alone = conversations()
        await _run_all(console, colocated.url, alone)
        _stop_if_cancelled(task)
    equal = _compare(console, handed, alone)
    note = "" if equal == len(handed) or exact else ", which is no failure here"
    console.print(f"checksum failures: {failures}; texts equal: {equal} of {len(handed)}{note}")
    return 0 if failures == 0 and (equal == len(handed) or not exact) else FAILED


def _stop_if_cancelled(task: asyncio.Task[Any]) -> None:
    """Raises CancelledError if the task was cancelled in a library that did not pass it on."""
    if task.cancelling():
        raise asyncio.CancelledError


def _flags(model: ModelConfig, threads: int) -> tuple[str, ...]:
    """Of every server: the same model in the same dtype, and no more memory than the prompts take."""
    return (
        *("--model", model.model, "--dtype", model.dtype, "--device", model.device, "--threads", str(threads)),
        *("--max-model-len", str(min(LONGEST_TOKENS, model.max_model_len))),
        *("--kv-pages", str(KV_PAGES), "--chunk-tokens", str(CHUNK_TOKENS)),
    )


@asynccontextmanager
async def _running(console: Console, servers: Mapping[str, LocalServer]) -> AsyncIterator[None]:
    """Servers by role, ready inside and drained at the end. Raises DemoFailed, which names the server that has ended
    too early, if one has."""
    names = " and the ".join(servers)
    try:
        with console.status(f"starting the {names} server"):
            waits = [asyncio.to_thread(server.wait_ready) for server in servers.values()]
            for (role, server), seconds in zip(servers.items(), await asyncio.gather(*waits), strict=True):
                console.print(f"   {role:<10} {server.url}  ready in {seconds:.1f} s")
        yield
        with console.status(f"draining the {names} server"):
            await asyncio.gather(*(asyncio.to_thread(server.end) for server in servers.values()))
    except (ServerFailed, DemoFailed) as error:
        raise DemoFailed(await _early_end(servers) or str(error)) from error
    finally:
        ends = (asyncio.to_thread(server.end) for server in servers.values())
        await asyncio.gather(*ends, return_exceptions=True)


async def _early_end(servers: Mapping[str, LocalServer]) -> str:
    """Which server has ended, and its last words; "" if none has. Its connections break a moment before it is gone."""
    until = time.monotonic() + LAST_MOMENT_S
    while time.monotonic() < until:
        for role, server in servers.items():
            if (status := server.process.poll()) is not None:
                words = [line for line in server.log.splitlines() if _COMPLAINT.match(line)]
                return f"the {role} server ended with status {status}" + "".join(
                    f": {_COMPLAINT.sub('', line)}" for line in words[-1:]
                )
        await asyncio.sleep(0.05)
    return ""


async def _run_all(console: Console, url: str, talks: Sequence[Conversation]) -> None:
    """All at the same time. Raises DemoFailed as soon as one of them fails."""
    try:
        with Live(_board(talks), console=console, refresh_per_second=8) as live:
            async with _client(url) as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(_run_one(client, talk)) for talk in talks]
                while not all(task.done() for task in tasks):
                    live.update(_board(talks))
                    await asyncio.sleep(0.1)
            live.update(_board(talks))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        if not console.is_terminal:
            console.line()  # where it is one, Live has ended the last line


async def _run_one(client: httpx.AsyncClient, talk: Conversation) -> None:
    body = {
        "messages": [{"role": "user", "content": talk.prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True, "include_progress": True},
    }
    talk.started_s = time.monotonic()
    with _connection():
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise DemoFailed(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(talk, json.loads(line.removeprefix("data: ")))
    if not talk.report:
        raise DemoFailed(f"{talk.name}: the answer has no end")


def _client(url: str) -> httpx.AsyncClient:
    return direct_async_client(base_url=url, timeout=SILENCE_S)


@contextmanager
def _connection() -> Iterator[None]:
    """Turns what can happen to a connection into DemoFailed."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise DemoFailed(f"the server said nothing for {SILENCE_S:.0f} s") from error
    except httpx.HTTPError as error:
        raise DemoFailed(f"the connection to the server broke ({type(error).__name__})") from error


def _take(talk: Conversation, event: dict[str, Any]) -> None:
    """Update a conversation from one streamed event."""
    if "error" in event:
        raise DemoFailed(f"{talk.name}: {event['error']['message']}")
    for choice in event.get("choices", ()):
        if content := choice["delta"].get("content"):
            talk.first_token_s = talk.first_token_s or time.monotonic() - talk.started_s
            talk.text += content
            talk.phase = "decoding"
        if choice.get("finish_reason"):
            talk.phase = f"done ({choice['finish_reason']})"
    progress = event.get("headrace", {})
    if "phase" in progress:
        talk.phase = f"prefill {progress['done']:,}/{progress['total']:,}" if progress["total"] else progress["phase"]
    if "timing_ms" in progress:
        talk.report = {**progress, "usage": event["usage"]}


def _board(talks: Sequence[Conversation]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, expand=True)
    table.add_column(min_width=8, style="bold", no_wrap=True)
    table.add_column(min_width=20, style="cyan", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for talk in talks:
        table.add_row(talk.name, printable(talk.phase), printable(" ".join(talk.text.split())[-120:]))
    return table


async def _checksum_failures(url: str) -> int:
    with _connection():
        async with _client(url) as client:
            lines = (await client.get("/metrics")).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("headrace_checksum_failures_total"))


def _compare(console: Console, handed: Sequence[Conversation], alone: Sequence[Conversation]) -> int:
    """Show what each prompt took, and return how many texts are equal."""
    table = Table(
        title="prefill → decode, against one colocated server (times in ms)",
        box=SIMPLE,
        padding=0,
        collapse_padding=True,
    )
    columns = ("prompt", "tokens", "queue", "forward", "transfer", "1st token", "pages", "MB", "equal")
    for column in columns:
        table.add_column(column, justify="left" if column == "prompt" else "right", no_wrap=True)
    equal = 0
    for talk, other in zip(handed, alone, strict=True):
        timing, moved = talk.report["timing_ms"], talk.report["handoff"]
        same = talk.text == other.text and talk.text != ""
        equal += same
        table.add_row(
            talk.name,
            f"{talk.report['usage']['prompt_tokens']:,}",
            f"{timing['queue']:.0f}",
            f"{timing['forward']:.0f}",
            f"{timing['transfer']:.1f}",
            f"{1000 * talk.first_token_s:.0f}",
            f"{moved['pages']:,}",
            f"{moved['bytes'] / 1e6:.1f}",
            "yes" if same else "NO",
        )
    console.print(table)
    return equal
