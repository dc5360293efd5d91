"""What holds after every fault: each request ended once, pages and rows are back, nothing is left behind."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.e2e.harness import wait_until
from tests.faults.load import BROKEN, RIGHT, Ended
from tests.faults.pair import PAGES, Pair
from tests.faults.servers import Supervised

BACK_S = 30.0
SPARE_DESCRIPTORS = 24  # of connections that are kept for a while
SPARE_THREADS = 12
EMPTY = (
    "open_requests", "open_tickets", "held_requests", "held_pages", "quarantined_pages", "integrity_errors",
    "metadata_rows_in_use", "reservations_waiting", "unacked_bytes", "queued_chunks", "sessions_being_revoked",
    "expected_requests", "unplanned_tokens", "queue_requests",
)  # fmt: skip


@dataclass(frozen=True)
class Life:
    """One life of a server as it was before a fault."""

    process: int
    scheduler: int
    metrics: dict[str, float]
    sizes: dict[int, tuple[int, int]]
    """Threads and descriptors by process id."""


def life(server: Supervised) -> Life:
    sizes = {}
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            sizes[process.pid] = process.num_threads(), process.num_fds()
    return Life(server.process.pid, server.named("scheduler").pid, server.metrics(), sizes)


def settled(server: Supervised) -> list[str]:
    """What is not back yet."""
    values = server.metrics()
    found = [f"{name} {value:g}" for name, value in values.items() if value and _name(name) in EMPTY]
    if leased := values['headrace_kv_pages{state="leased"}']:
        found.append(f"{leased:g} pages leased")
    pages = sum(value for name, value in values.items() if name.startswith("headrace_kv_pages{"))
    if pages != PAGES:
        found.append(f"{pages:g} pages in all")
    return found


def check_settled(pair: Pair) -> None:
    """Pages, rows, tickets and sessions are back at both ends."""
    for server in pair.servers:
        wait_until(lambda server=server: not settled(server), BACK_S, f"{server.name} settles")


def check_ends(pair: Pair, ends: Sequence[Ended], before: dict[str, Life], broken: bool) -> None:
    """Every request ended once, well or with a typed error. broken: connections may have ended, since a front end or a
    network has."""
    wrong = [each.outcome for each in ends if each.wrong]
    assert not wrong, wrong
    for server in pair.servers:
        died = before[server.name].process != server.process.pid
        cut = [each for each in ends if each.outcome == BROKEN and each.url == server.url]
        assert broken or died or not cut, f"{server.name} lives and has cut {len(cut)} connections"


def check_totals(pair: Pair, right_of_decode: int, uncounted: int, before: dict[str, Life]) -> None:
    """Both sides count the same ends, where their schedulers have lived through the fault. uncounted: so many requests
    more may have ended well."""
    lived = {
        server.name: life(server).scheduler == before[server.name].scheduler for server in pair.servers
    }  # fmt: skip
    if lived["decode"]:
        finished = _delta(pair.decode, before["decode"], "requests_total", 'outcome="finished"')
        told = f"{finished} finished, {right_of_decode} answered with 200"
        assert right_of_decode <= finished <= right_of_decode + uncounted, told
    for server in pair.servers:
        if lived[server.name]:
            ended = _delta(server, before[server.name], "requests_total", "")
            asked = _delta(server, before[server.name], "http_requests_total", 'route="/v1/')
            assert ended <= asked, f"{server.name}: {ended} ended, {asked} came"
    if all(lived.values()):
        # A handoff whose last acknowledgement is lost has failed here and may have been used there.
        refused = _delta(pair.prefill, before["prefill"], "requests_total", 'outcome="refused"')
        handed = _delta(pair.prefill, before["prefill"], "requests_total", "") - refused
        assert handed >= right_of_decode, f"{handed} handed over, {right_of_decode} answered with 200"


def check_left_behind(pair: Pair, before: dict[str, Life]) -> None:
    """No process, thread, descriptor, folder or shared memory is left of what has ended."""
    for server in pair.servers:
        wait_until(lambda server=server: not server.orphans(), 15, f"processes of {server.name} end")
        folders = [name for name in server.temporary() if name.startswith("headrace-")]
        assert len(folders) <= 1, f"{server.name} has left folders of lives before: {folders}"
        then = before[server.name].sizes
        for process in server.processes():
            if process.pid in then:
                threads, descriptors = then[process.pid]
                assert process.num_threads() <= threads + SPARE_THREADS, (server.name, process)
                assert process.num_fds() <= descriptors + SPARE_DESCRIPTORS, (server.name, process)
    wait_until(lambda: not any(server.abandoned() for server in pair.servers), 15, "shared memory is given back")


def check_gone(pair: Pair) -> None:
    """After an orderly end there is nothing at all."""
    for server in (pair.decode, pair.prefill):
        status = server.end()
        assert status == 0, f"{server.name} ended with status {status}\n{server.log}"
    for server in pair.servers:
        assert not server.orphans()
        assert server.temporary() == []
        assert server.bound() == []
    wait_until(lambda: not any(server.abandoned() for server in pair.servers), 15, "shared memory is given back")


def _delta(server: Supervised, before: Life, metric: str, label: str) -> float:
    def total(values: dict[str, float]) -> float:
        return sum(value for name, value in values.items() if _name(name) == metric and label in name)

    return total(server.metrics()) - total(before.metrics)


def _name(sample: str) -> str:
    return sample.partition("{")[0].removeprefix("headrace_")


def right(ends: Sequence[Ended], url: str) -> int:
    """Requests to a server that ended well."""
    return sum(each.outcome == RIGHT and each.url == url for each in ends)
