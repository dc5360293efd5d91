"""`headrace demo`: disaggregated prefill on this machine, with real servers.

Starts a prefill and a decode server on free loopback ports, sends four prompts at once to the decode server, shows
the prefill's progress and the texts as they come, then runs the same prompts on one colocated server and compares.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.server.launch.local_server import LocalServer, ServerFailed

MAX_TOKENS = 48
LONG_TEXT = "adventure.txt"


class DemoFailed(Exception):
    """A server responded with an error."""


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
    """The four prompts: one long real text, three short ones."""
    story = (files("headrace.server") / "data" / LONG_TEXT).read_text(encoding="utf-8")
    return [
        Conversation("a story", f"{story}\n\nIn two sentences: whom does Alice follow, and what happens to her?"),
        Conversation("physics", "Explain in two sentences why the sky is blue."),
        Conversation("code", "Write a Python function that returns the n-th Fibonacci number."),
        Conversation("capital", "What is the capital of France, and which river runs through it?"),
    ]


def main(arguments: argparse.Namespace) -> int:
    """Run the demonstration. Returns 0 when every text equals the colocated one and no checksum failed."""
    console = Console()
    try:
        return asyncio.run(_demo(console, arguments.model, arguments.dtype))
    except (ServerFailed, DemoFailed) as error:
        console.print(f"[red]failed:[/] {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; servers stopped")
        return 130


async def _demo(console: Console, model: str, dtype: str) -> int:
    flags = ["--model", model, "--dtype", dtype]
    console.print("[bold]1.[/] a prefill server and a decode server")
    async with (
        _server(console, "prefill", flags) as prefill,
        _server(console, "decode", [*flags, "--threads", "1", "--prefill", prefill]) as decode,
    ):
        handed = conversations()
        console.print("[bold]2.[/] four prompts at once; the decode server gets their KV pages from the prefill server")
        await _run_all(console, decode, handed)
        failures = await _checksum_failures(decode)
    console.print("[bold]3.[/] the same prompts on one colocated server")
    async with _server(console, "colocated", flags) as colocated:
        alone = conversations()
        await _run_all(console, colocated, alone)
    return _verdict(console, handed, alone, failures)


@asynccontextmanager
async def _server(console: Console, role: str, flags: Sequence[str]) -> AsyncIterator[str]:
    """A ready server of this role; yields its URL and drains it at the end."""
    server = LocalServer("--role", role, *flags)
    try:
        with console.status(f"starting the {role} server at {server.url}"):
            seconds = await asyncio.to_thread(server.wait_ready)
        console.print(f"   {role:<10} {server.url}  ready in {seconds:.1f} s")
        yield server.url
    finally:
        await asyncio.to_thread(server.end)
        server.close()


async def _run_all(console: Console, url: str, talks: Sequence[Conversation]) -> None:
    with Live(_board(talks), console=console, refresh_per_second=8) as live:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_one(client, talk)) for talk in talks]
            while not all(task.done() for task in tasks):
                live.update(_board(talks))
                await asyncio.sleep(0.1)
        live.update(_board(talks))


async def _run_one(client: httpx.AsyncClient, talk: Conversation) -> None:
    body = {
        "messages": [{"role": "user", "content": talk.prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True, "include_progress": True},
    }
    talk.started_s = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise DemoFailed(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(talk, json.loads(line.removeprefix("data: ")))


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
        table.add_row(talk.name, talk.phase, " ".join(talk.text.split())[-120:])
    return table


async def _checksum_failures(url: str) -> int:
    async with httpx.AsyncClient(base_url=url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("headrace_checksum_failures_total"))


def _verdict(console: Console, handed: Sequence[Conversation], alone: Sequence[Conversation], failures: int) -> int:
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
    console.print(f"checksum failures: {failures}; texts equal: {equal} of {len(handed)}")
    return 0 if equal == len(handed) and failures == 0 else 1
