"""The dashboard and the alert rules in a real Prometheus that scrapes a loaded pair: no query fails, is empty without a
reason, or counts anything twice; the counts are those of the clients."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from headrace.gateway.metrics import OWN_CATALOG
from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.exposition import PREFIX
from tests.deployment.test_dashboard import METRIC, alert_queries, panels, queries_of
from tests.e2e.harness import Server, running, wait_until
from tests.prometheus.load import COMPLETIONS, LONG, Clients, load
from tests.prometheus.monitor import Monitor, executable, filled, monitoring, since_start

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(executable() is None, reason="no Prometheus here; on Debian: apt-get install prometheus"),
]

MODEL = ("--model", "stub:layers=4,hidden=32,us_per_token=200,max_len=16000", "--dtype", "float32")

EMPTY = {
    "accept_failures_total": "no descriptors were missing",
    "connections_closed_total": "none had to be closed",
    "expert_imbalance": "the model has no experts",
    "handshakes_refused_total": "there are no CURVE keys",
    "kv_tier_pages": "there are no tiers",
    "kv_tier_pages_total": "there are no tiers",
    "refusals_total": "the two servers fit",
    "refused_here_total": "the two servers fit",
    "reservations_refused_total": "no peer wanted too much",
    "sessions_displaced_total": "there is one peer",
    "stage_disk_ignored_total": "there are no tiers",
    "stage_expert_rows_total": "the model has no experts",
    "stage_silences_total": "no stage was silent",
    "stage_tier_bytes_total": "there are no tiers",
    "stage_tier_failures_total": "there are no tiers",
}
EMPTY |= {spec.name: "there is no gateway" for spec in OWN_CATALOG}
"""Metrics whose queries find nothing on this pair, and why."""

BY_CHANCE = {"chunks_rejected_total", "dropped_messages_total", "nacks_total", "stale_messages_total"}
"""Metrics of which there may be some: what cancellations leave behind, such as chunks on their way to a ticket that the
peer has given up."""


class Loaded(NamedTuple):
    """A pair after its load, with what its clients counted, and Prometheus beside it."""

    prefill: Server
    decode: Server
    clients: Clients
    monitor: Monitor


def address(server: Server) -> str:
    return urlsplit(server.url).netloc


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    clients = Clients()
    with (
        dying(Server("--role", "prefill", "--bootstrap-timeout", "3", *MODEL)) as prefill,
        running(Server("--role", "decode", "--prefill", prefill.url, *MODEL)) as decode,
        monitoring(
            tmp_path_factory.mktemp("prometheus"), {address(prefill): "prefill", address(decode): "decode"}
        ) as monitor,
    ):
        monitor.wait_scraped(2)
        load(clients, prefill, decode)
        monitor.wait_scraped(2)
        yield Loaded(prefill, decode, clients, monitor)


@contextmanager
def dying(server: Server) -> Iterator[Server]:
    """A ready server that the last test kills."""
    try:
        yield server.started()
    finally:
        if server.process.poll() is None:
            server.kill()


def panel(title: str) -> list[str]:
    """The queries of a panel."""
    (found,) = (each for each in panels() if each["title"] == title)
    return queries_of(found)


def names(query: str) -> set[str]:
    """Metrics of a query, without the prefix."""
    specs = {spec.name for spec in CATALOG}
    found = {match["name"].removeprefix(PREFIX) for match in METRIC.finditer(query)}
    return {name if name in specs else re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_every_query_finds_something_or_there_is_a_reason_why_not(loaded: Loaded) -> None:
    """Prometheus refuses those that would pair or double series."""
    empty = set()
    for each in panels():
        for query in queries_of(each):
            if not loaded.monitor.ask(filled(query)):
                empty.add((each["title"], query))
    unexpected = {(title, query) for title, query in empty if not names(query) & (set(EMPTY) | BY_CHANCE)}
    assert not unexpected
    found = {name for _, query in empty for name in names(query)}
    assert set(EMPTY) <= found, f"not empty: {set(EMPTY) - found}"


def test_ends_are_those_that_clients_saw(loaded: Loaded) -> None:
    clients, monitor = loaded.clients, loaded.monitor
    by_route = 'sum by (outcome, reason, route) (headrace_requests_total{instance="%s"}) > 0'
    for server in (loaded.prefill, loaded.decode):
        found = monitor.ask(by_route % address(server), "outcome", "reason", "route")
        if server is loaded.prefill:  # the decode server is its client, too
            found = {end: count for end, count in found.items() if end[1] in ("discarded", "no_peer")}
        assert found == clients.ends[server.url]
    ours = clients.ends[loaded.decode.url]
    (total,) = monitor.ask(since_start(panel("Requests per second")[0])).values()
    assert total == sum(ours.values())
    by_reason: dict[tuple[str, str], int] = {}
    for (outcome, reason, _), count in ours.items():
        by_reason[outcome, reason] = by_reason.get((outcome, reason), 0) + count
    assert monitor.ask(since_start(panel("Ended requests")[0]), "outcome", "reason") == by_reason
    assert ours["failed", "deadline_exceeded", COMPLETIONS] == ours["cancelled", "cancelled", COMPLETIONS] == 6
    assert ours["refused", "unknown_field", COMPLETIONS] == 6
    assert ours["refused", "prompt_too_long", COMPLETIONS] == 1
    (share,) = monitor.ask(since_start(panel("Failed share")[0])).values()
    assert share == pytest.approx(6 / total)


def test_tokens_are_those_that_clients_were_told(loaded: Loaded) -> None:
    clients, monitor = loaded.clients, loaded.monitor
    prompt, generated = panel("Tokens")
    assert monitor.ask(since_start(prompt)) == {(): clients.prompt_tokens}
    assert monitor.ask(since_start(generated)) == {(): clients.generated_tokens}
    finished = sum(count for (outcome, *_), count in clients.ends[loaded.decode.url].items() if outcome == "finished")
    times = "sum(headrace_%s_count{role=~'decode|colocated'})"
    for name in ("e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        assert monitor.ask(times % name) == {(): finished}
    assert monitor.ask(times % "inter_token_latency_seconds") == {(): clients.generated_tokens - finished}
    assert monitor.ask(times % "time_to_first_token_seconds") == {(): finished}


def test_http_answers_and_bytes(loaded: Loaded) -> None:
    clients, monitor = loaded.clients, loaded.monitor
    answers = monitor.ask(since_start(panel("HTTP answers")[0]), "role", "route", "status")
    ours = {(route, status): count for (role, route, status), count in answers.items() if role == "decode"}
    ours = {key: count for key, count in ours.items() if key[0].startswith("/v1/c")}
    assert ours == clients.statuses[loaded.decode.url]
    sent, received = (monitor.ask(since_start(query)) for query in panel("Bytes"))
    assert sum(sent.values()) >= sum(received.values()) > 0, "what was cancelled on its way was not received"


def test_first_failures_are_seen(loaded: Loaded) -> None:
    """The series were there with 0 before: an increase over the whole time is the count, but for extrapolation."""
    query = 'sum(increase(headrace_requests_total{role="decode", reason="%s"}[5m]))'
    for reason, count in (("deadline_exceeded", 6), ("prompt_too_long", 1)):
        (seen,) = loaded.monitor.ask(query % reason).values()
        assert seen == pytest.approx(count, rel=0.4), reason
    left = loaded.monitor.ask(
        "sum by (phase) (headrace_request_failures_total{role='decode', reason='deadline_exceeded'}) > 0", "phase"
    )
    assert set(left) <= {("waiting",), ("fetching",)}
    assert sum(left.values()) == 6


def test_every_process_has_memory_and_cpu(loaded: Loaded) -> None:
    for query in (*panel("Memory"), *panel("CPU")):
        found = loaded.monitor.ask(filled(query), "role", "process")
        assert set(found) == {
            (role, process) for role in ("prefill", "decode") for process in ("front_end", "scheduler", "rank_0")
        }
        assert all(found.values()), "all have worked"
    memory = loaded.monitor.ask("sum by (role) (headrace_process_resident_memory_bytes)", "role")
    assert all(50e6 < value < 20e9 for value in memory.values())


def test_alert_rules_have_data_and_are_quiet(loaded: Loaded) -> None:
    groups = loaded.monitor.get("/api/v1/rules")["groups"]
    assert [
        (rule["name"], rule["lastError"]) for group in groups for rule in group["rules"] if rule["health"] != "ok"
    ] == []
    for query in alert_queries():
        for match in METRIC.finditer(query):
            assert loaded.monitor.ask(f"count({match[0]})"), f"{match[0]} does not exist"
    assert loaded.monitor.ask("ALERTS{alertstate='firing'}") == {}


def test_scrapes_stay_small_and_fast(loaded: Loaded) -> None:
    """Under the load: what a scrape took, and how many series it brought."""
    took = loaded.monitor.ask("quantile_over_time(0.5, scrape_duration_seconds[5m])", "role")
    longest = loaded.monitor.ask("max_over_time(scrape_duration_seconds[5m])", "role")
    series = loaded.monitor.ask("max_over_time(scrape_samples_scraped[5m])", "role")
    print(took, longest, series)
    assert max(took.values()) < 0.5
    assert max(longest.values()) < 5, "a scrape waits a second for the scheduler, and this machine may be busy"
    assert max(series.values()) < 2500


def test_a_prefill_server_that_dies(loaded: Loaded) -> None:
    """Last: its requests fail with a reason of their own, in the phase of the handoff, and the alerts say so."""
    clients, monitor = loaded.clients, loaded.monitor
    asked = Thread(target=clients.ask, args=(loaded.decode, COMPLETIONS, {"prompt": [3, *LONG]}))
    asked.start()
    wait_until(lambda: loaded.prefill.metrics()['headrace_queue_requests{queue="running"}'] > 0, 10, "it computes")
    loaded.prefill.kill()
    asked.join()
    expected = {("HeadraceDown",), ("HeadraceNotReady",), ("HeadraceNoPrefillServer",)}
    wait_until(lambda: expected <= set(monitor.ask("count by (alertname) (ALERTS)")), 30, "the alerts are pending")
    gone = ("peer_gone", "prefill_lost", "prefill_unreachable")
    (end,) = (each for each in clients.ends[loaded.decode.url] if each[1] in gone)
    chosen = f"{{role='decode', reason=~'{'|'.join(gone)}'}}"
    by_reason = monitor.ask(f"sum by (outcome, reason) (headrace_requests_total{chosen}) > 0", "outcome", "reason")
    assert by_reason == {("failed", end[1]): 1}
    by_phase = monitor.ask(f"sum by (phase) (headrace_request_failures_total{chosen}) > 0", "phase")
    assert by_phase == {("fetching",): 1}
