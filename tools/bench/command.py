"""`headrace bench serve`: asks the server what it is, warms it up, sends the load, prints the table."""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence

from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.output import complain, say
from headrace.core.runtime.signals import INTERRUPTED_BY, ending
from headrace.core.types.errors import ConfigError
from headrace.integrations.http_client import bearer
from headrace.server.config.load import load
from headrace.tools.bench import options, plot
from headrace.tools.bench.http_client import HttpClient
from headrace.tools.bench.options import Options
from headrace.tools.bench.report import BenchReport, as_text, first_failure
from headrace.tools.bench.runner import COMPLETIONS, BenchLoad, BenchRunner, Measured
from headrace.tools.bench.summary import summarise
from headrace.tools.bench.target import Target, base_url, find_target
from headrace.tools.bench.workload import PlannedRequest, warmup
from headrace.tools.output import ProgressLine, check_plotting, write_json

NONE_OK = 1  # exit status when no request was answered
PROGRESS_S = 0.5  # between two updates of the line


def main(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the command. Returns 0, 1 if no request was answered, or 128 + N after signal N, which prints what was
    measured until then. Raises ConfigError for a wrong flag or file, and for a server that cannot be measured."""
    chosen = options.parse(vars(given), base_url(given.url))
    check_plotting(chosen.plot)
    keys = load({}, environ).server.api_keys
    headers = bearer(keys[0] if keys else "")
    requests = options.planned(chosen)
    target = find_target(chosen.url, headers, chosen.model, chosen.endpoint)
    generating = target.path == COMPLETIONS
    options.check_lengths(requests, target.max_model_len, generating=generating)
    taken: list[int] = []
    measured = asyncio.run(_measure(chosen, target, headers, requests, taken))
    report = BenchReport(
        url=chosen.url,
        endpoint=target.path,
        model=target.model,
        server=f"{target.name}, role {target.role}" if target.name else "",
        role=target.role,
        arrivals=options.arrivals_in_words(chosen),
        lengths=options.lengths_in_words(chosen, generating=generating),
        seed=chosen.seed,
        warmups=chosen.num_warmups,
        limits=chosen.limits,
        interrupted=measured.interrupted,
        summary=summarise(measured, chosen.limits, chosen.percentiles),
        requests=measured.outcomes,
    )
    say(as_text(report))
    write_json(chosen.json, report)
    if chosen.plot is not None:
        plot.draw(report, chosen.plot)
    if measured.interrupted:
        complain("interrupted; the figures are of what was sent until then")
        return INTERRUPTED_BY + taken[0]
    return 0 if report.summary.ok else NONE_OK


async def _measure(
    chosen: Options, target: Target, headers: dict[str, str], requests: Sequence[PlannedRequest], taken: list[int]
) -> Measured:
    """Warm the server up and send the load; a signal ends it, and is put into taken; a second one ends the program."""
    clock = SystemClock()
    client = HttpClient(chosen.url, headers, clock)
    what = BenchLoad(
        model=target.model,
        path=target.path,
        seed=chosen.seed,
        timeout_s=chosen.timeout,
        temperature=chosen.temperature,
        ignore_eos=not chosen.stop_at_eos,
        open_loop=chosen.open_loop,
        concurrency=chosen.max_concurrency,
    )
    progress = ProgressLine(sys.stderr, clock, PROGRESS_S)
    runner = BenchRunner(client, what, clock, lambda ended: progress.show(f"{ended:,} of {len(requests):,} requests"))
    try:
        if failed := await runner.warm_up(warmup(requests, chosen.num_warmups)):
            raise ConfigError(f"the first request failed: {first_failure([failed])}")
        stop, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), ending()

        def interrupt(number: int) -> None:
            taken.append(number)
            for each in numbers:
                loop.remove_signal_handler(each)
            stop.set()

        for each in numbers:
            loop.add_signal_handler(each, interrupt, each)
        return await runner.run(requests, stop)
    finally:
        progress.close()
        client.close()
