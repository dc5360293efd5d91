"""Time to first token, ms, through a decode peer and without one: what the handoff of the KV costs.

`python -m benchmarks.handoff` starts a prefill and a decode server. Each request runs alone; the two ways alternate.
"""

import statistics
import time
from collections.abc import Sequence

from benchmarks.arguments import add_lengths, add_model, add_rounds, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import first_event_ms, prefill_seconds, serving
from headrace.integrations.http_client import direct_client
from headrace.server.launch.local_server import LocalServer


def through_peer_ms(decode: LocalServer, ids: list[int]) -> float:
    """Milliseconds from the request to the first token of the decode server's stream."""
    body = {"prompt": ids, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    with (
        direct_client(base_url=decode.url, timeout=600) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        return first_event_ms(response.iter_lines(), started)


def without_peer_ms(prefill: LocalServer, ids: list[int]) -> float:
    """Milliseconds from the request to the answer with the first token."""
    return 1000 * prefill_seconds(prefill, ids, max_tokens=2, ignore_eos=True)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ServerFailed."""
    parser = make_parser("handoff", __doc__)
    add_model(parser)
    add_rounds(parser, 5)
    add_lengths(parser, 128, 512, 2048)
    given = parser.parse_args(arguments)
    flags = ("--model", given.model, "--dtype", given.dtype, "--no-prefix-cache")
    rows = []
    with (
        serving("--role", "prefill", *flags, status="starting a prefill server") as prefill,
        serving("--role", "decode", "--prefill", prefill.url, *flags, status="starting a decode server") as decode,
    ):
        for length in given.lengths:
            with console.status(f"{length} tokens"):
                through_peer_ms(decode, prompt(64, 0))  # warm-up
                without_peer_ms(prefill, prompt(64, 1))
                pairs = [
                    (
                        through_peer_ms(decode, prompt(length, 2 * seed)),
                        without_peer_ms(prefill, prompt(length, 2 * seed + 1)),
                    )
                    for seed in range(1, 1 + given.rounds)
                ]
            ratio = statistics.median(a / b for a, b in pairs)
            rows.append((f"{length:,}", spread([a for a, _ in pairs]), spread([b for _, b in pairs]), f"{ratio:.3f}"))
    print_table(
        f"time to first token, ms, {given.dtype}: median (range) of {given.rounds} rounds",
        ("tokens", "through a decode peer", "without a peer", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
