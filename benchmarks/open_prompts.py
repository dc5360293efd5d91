"""Time to first token after the commit of a prompt that came in pieces, beside its last piece alone behind a cached
prefix, and beside the prompt sent whole; and that of others with and without open prompts beside.

    whole    ├──────────────── 8,000 tokens ────────────────┤ first token
    pieces   ├ 200 ┤├ 200 ┤├ 200 ┤ …            ├ 200 ┤ commit ├┤ first token

From the first piece to the last it takes as long as computing the whole prompt (--over 1), or that many times as long;
each comes when those before it would be computed. --over 0: the last one when those before it are computed. All on one
server, in turns.
"""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import msgspec

from benchmarks.arguments import add_dtype, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_seconds, serving
from headrace.integrations.http_client import direct_client
from headrace.server.launch.local_server import LocalServer

PAGE_SIZE = 16
VOCABULARY = 40_000
OTHERS = 6  # prompts of others in each measurement
OPEN_BESIDE = 3  # open prompts that are appended to meanwhile
PAUSE_S = 0.3  # between two prompts of others


class Times(msgspec.Struct):
    """Seconds."""

    whole: list[float] = msgspec.field(default_factory=list)
    last_piece: list[float] = msgspec.field(default_factory=list)
    after_commit: dict[float, list[float]] = msgspec.field(default_factory=dict)
    others_alone: list[float] = msgspec.field(default_factory=list)
    others_beside: list[float] = msgspec.field(default_factory=list)


class Prompts:
    """Prompts that share no prefix."""

    def __init__(self) -> None:
        self._seed = 0

    def next(self, tokens: int) -> list[int]:
        """The next prompt."""
        self._seed += 1
        return prompt(tokens, self._seed, VOCABULARY)


def pieces_of(tokens: list[int], count: int) -> list[list[int]]:
    """A prompt in so many pieces."""
    size = -(-len(tokens) // count)
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def growing_seconds(http: httpx.Client, pieces: Sequence[list[int]], at: Sequence[float]) -> float:
    """Seconds from the commit to the first token of a prompt whose pieces come at these times, the last one with the
    commit."""
    began = time.perf_counter()
    name = ""
    for number, (piece, due) in enumerate(zip(pieces, at, strict=True), 1):
        if number == len(pieces) and not any(at):
            wait_computed(http, name)
        time.sleep(max(0.0, began + due - time.perf_counter()))
        if not name:
            name = (
                http.post("/v1/prefill", json={"open": True, "prompt_token_ids": piece}).raise_for_status().json()["id"]
            )
        else:
            http.patch(f"/v1/prefill/{name}", json={"append": piece}).raise_for_status()
    committed = time.perf_counter()
    body = {"handoff": "none", "temperature": 0, "max_tokens": 1}
    http.post(f"/v1/prefill/{name}/commit", json=body).raise_for_status()
    return time.perf_counter() - committed


def wait_computed(http: httpx.Client, name: str) -> None:
    """Wait until all whole pages of an open prompt are computed."""
    while (state := http.get(f"/v1/prefill/{name}").raise_for_status().json())["computed"] < state[
        "stable"
    ] - PAGE_SIZE:
        time.sleep(0.02)


def others_seconds(server: LocalServer, prompts: Prompts, tokens: int) -> list[float]:
    """Times to first token of short prompts, one after the other."""
    found = []
    for _ in range(OTHERS):
        time.sleep(PAUSE_S)
        found.append(prefill_seconds(server, prompts.next(tokens)))
    return found


def grow_beside(http: httpx.Client, prompts: Prompts, tokens: int, done: Event) -> None:
    """Keep open prompts growing, so that there is always a piece to compute."""
    while not done.is_set():
        body = {"open": True, "prompt_token_ids": prompts.next(tokens // 2)}
        name = http.post("/v1/prefill", json=body).raise_for_status().json()["id"]
        for piece in pieces_of(prompts.next(tokens // 2), 20):
            if done.wait(0.2):
                break
            http.patch(f"/v1/prefill/{name}", json={"append": piece}).raise_for_status()
        http.delete(f"/v1/prefill/{name}").raise_for_status()


def measure(
    server: LocalServer, http: httpx.Client, prompts: Prompts, given: "Given", overs: Sequence[float], times: Times
) -> None:
    """One round."""
    half_s = prefill_seconds(server, prompts.next(given.tokens // 2))
    whole_s = prefill_seconds(server, prompts.next(given.tokens))
    times.whole.append(whole_s)
    tokens = prompts.next(given.tokens)
    pieces = pieces_of(tokens, given.pieces)
    prefill_seconds(server, tokens[: len(tokens) - len(pieces[-1])])
    times.last_piece.append(prefill_seconds(server, tokens))
    squared = max(0.0, 2 * (whole_s - 2 * half_s)) / given.tokens**2  # seconds per squared token
    token = (whole_s - squared * given.tokens**2) / given.tokens
    ends = [given.tokens * number / given.pieces for number in range(given.pieces)]
    for over in overs:
        work = [token * end + squared * end**2 for end in ends]
        at = [over * whole_s * each / work[-1] for each in work]
        seconds = growing_seconds(http, pieces_of(prompts.next(given.tokens), given.pieces), at)
        times.after_commit.setdefault(over, []).append(seconds)
    times.others_alone += others_seconds(server, prompts, given.short)
    done = Event()
    with ThreadPoolExecutor(OPEN_BESIDE) as pool:
        grown = [pool.submit(grow_beside, http, prompts, given.tokens, done) for _ in range(OPEN_BESIDE)]
        time.sleep(0.5)
        times.others_beside += others_seconds(server, prompts, given.short)
        done.set()
        for each in grown:
            each.result()


class Given(msgspec.Struct, frozen=True):
    """Lengths in tokens."""

    tokens: int
    pieces: int
    short: int


def _pace(over: float) -> str:
    return f"over {over:g} of its time" if over else "the last when others are computed"


def main(arguments: Sequence[str]) -> int:
    """Print the tables. Raises ConfigError, ServerFailed."""
    parser = make_parser("open_prompts", __doc__)
    parser.add_argument("--model", default="smollm2", help="as in headrace serve")
    add_dtype(parser)
    add_threads(parser)
    parser.add_argument("--tokens", type=int, default=8000, metavar="N", help="tokens of the prompt")
    parser.add_argument("--pieces", type=int, default=40, metavar="N", help="pieces in which it comes")
    parser.add_argument("--short", type=int, default=100, metavar="N", help="tokens of the prompts of others")
    parser.add_argument("--over", type=float, nargs="+", default=[0.0, 1.0, 1.5], metavar="FACTOR",
                        help="time over which it comes, beside that of computing it")  # fmt: skip
    add_rounds(parser, 3)
    options = parser.parse_args(arguments)
    given = Given(options.tokens, options.pieces, options.short)
    prompts, times = Prompts(), Times()
    pages = 8 * given.tokens // PAGE_SIZE
    flags = ("--role", "prefill", "--model", options.model, "--dtype", options.dtype, "--kv-pages", str(pages),
             "--page-size", str(PAGE_SIZE), "--threads", str(options.threads))  # fmt: skip
    with serving(*flags) as server, direct_client(base_url=server.url, timeout=600) as http:
        prefill_seconds(server, prompts.next(given.tokens // 2))
        for number in range(options.rounds):
            with console.status(f"round {number + 1} of {options.rounds}"):
                measure(server, http, prompts, given, options.over, times)

    def row(name: str, seconds: Sequence[float], base: Sequence[float]) -> tuple[str, ...]:
        ratio = statistics.median(seconds) / statistics.median(base)
        return name, spread([1000 * value for value in seconds]), f"{ratio:.3f}"

    rows = [
        row("whole", times.whole, times.last_piece),
        row("last piece behind a cached prefix", times.last_piece, times.last_piece),
        *(row(f"in {given.pieces} pieces, {_pace(over)}", seconds, times.last_piece)
          for over, seconds in times.after_commit.items()),
    ]  # fmt: skip
    title = f"Time to first token of {given.tokens:,} tokens; median (range)"
    print_table(title, ("prompt", "ms", "beside the last piece"), rows)
    others = [
        row("alone", times.others_alone, times.others_alone),
        row(f"beside {OPEN_BESIDE} open prompts", times.others_beside, times.others_alone),
    ]
    print_table(f"{given.short} tokens of others; median (range)", ("server", "ms", "ratio"), others)
    return 0


if __name__ == "__main__":
    run(main)
