"""SIGTERM, and a second one, to both servers of a pair behind a slow link: nothing is lost that could be ended."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.e2e.harness import wait_until
from tests.e2e.streams import Stream
from tests.faults.load import RIGHT, Asked, Ended, body_of
from tests.faults.pair import NAME, Pair, relayed_pair
from tests.faults.servers import Supervised

TOKENS = 4
LENGTHS = (600, 900, 300)
SLOW = 2.5e6  # bytes per second: the KV of LENGTHS takes seconds
STOPPED = 5e2  # it takes longer than any of these tests
PATIENT = ("--transfer-timeout", "60", "--drain-timeout", "60")
LONG = 3000  # tokens of a text that does not end by itself
ENDLESS = {"model": NAME, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
GENERATE = {"sampling_params": {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}}


class Site:
    """The pair, and what is asked of it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.asked = Asked()
        self._seed = 0

    def prompt(self, length: int) -> tuple[int, ...]:
        """One that no prefix cache knows."""
        self._seed += 1
        return self.pair.texts.prompt(length, self._seed)

    def ask(self) -> None:
        """Some prompts, whose texts the decode server is to return."""
        for length in LENGTHS:
            prompt = self.prompt(length)
            text = self.pair.texts.after(prompt, TOKENS)
            self.asked.ask(self.pair.decode.url, body_of(prompt, TOKENS), text)

    def stream(self, path: str, **body: Any) -> Stream:
        """A text that goes on for long, of which the first token has come."""
        stream = Stream(self.pair.decode.url, path, body)
        wait_until(lambda: len(stream.events) > 1, 30, "the text has begun")
        return stream

    def in_flight(self) -> None:
        """Wait until chunks are on their way."""
        wait_until(lambda: self.pair.prefill.total("headrace_unacked_bytes") > 0, 30, "chunks are on their way")

    def ready(self, *more: str) -> tuple[Supervised, Supervised]:
        """Both servers, started again where they have ended. more: flags of the prefill server, which is started
        again in any case."""
        prefill, decode = self.pair.servers
        self.pair.clear()
        prefill.add_flags(*more)
        for server in (prefill, decode):
            server.end()
            server.revive()
        self.pair.settled()
        return prefill, decode

    def gone(self, server: Supervised, status: int, children: list[psutil.Process]) -> None:
        """It ends with this status, and nothing is left of it."""
        assert server.ended() == status, server.log
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
        assert server.temporary() == []
        assert "Traceback" not in server.log
        assert server.abandoned() == []


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with relayed_pair(("--pp", "1", "--transfer-backends", "zmq", *PATIENT), PATIENT, backends="shm,zmq") as pair:
        made = Site(pair)
        yield made
        made.asked.close()


def stop(server: Supervised, number: int) -> None:
    """The first signal."""
    server.process.send_signal(number)
    wait_until(lambda: server.get("/ready").status_code == 503, 5, "it is not ready")


def settled(server: Supervised) -> None:
    """No page is in use."""
    wait_until(lambda: server.metrics()['headrace_kv_pages{state="leased"}'] == 0, 20, "pages are back")


def right(ends: list[Ended]) -> None:
    assert [each.outcome for each in ends] == [RIGHT] * len(ends)


def test_a_pair_is_stopped(site: Site) -> None:
    """A rolling restart kills no request: the prefill server is not ready at once, and ends when its last chunk is
    acknowledged. A second signal fails fast: the decode server's text is cut short, and its client is told."""
    prefill, decode = site.pair.servers
    stream = site.stream("/v1/completions", prompt=site.prompt(20), **ENDLESS)
    site.pair.network.slow(SLOW)
    site.ask()
    site.in_flight()
    children = prefill.children()
    for process in children:  # systemd signals all of them
        process.send_signal(signal.SIGTERM)
    stop(prefill, signal.SIGTERM)
    assert prefill.get("/health").status_code == 200
    refused = prefill.post("/v1/prefill", {"prompt": "late", "ticket": "late"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    assert prefill.total("headrace_unacked_bytes") > 0
    right(site.asked.results())
    site.gone(prefill, 0, children)
    children = decode.children()
    stop(decode, signal.SIGTERM)
    seen = len(stream.events)
    wait_until(lambda: len(stream.events) > seen, 10, "the text goes on")
    decode.process.send_signal(signal.SIGINT)
    assert stream.error()["code"] == "draining"
    site.gone(decode, 128 + signal.SIGINT, children)


@pytest.mark.full
def test_both_sides_are_told_when_the_drain_takes_too_long(site: Site) -> None:
    prefill, decode = site.ready("--drain-timeout", "1")
    site.pair.network.slow(STOPPED)
    site.ask()
    site.in_flight()
    children = prefill.children()
    prefill.process.send_signal(signal.SIGTERM)
    assert {each.outcome for each in site.asked.results()} == {"503 draining"}
    site.gone(prefill, 0, children)
    settled(decode)
    assert "3 requests and 0 held prompts are left after 1 s" in prefill.log


@pytest.mark.full
def test_a_second_signal_to_a_prefill_server(site: Site) -> None:
    """Its own clients and those of the decode server are told."""
    prefill, decode = site.ready()
    site.pair.network.slow(STOPPED)
    site.ask()
    site.in_flight()
    children = prefill.children()
    own = {"prompt": "no peer comes", "ticket": "lonely"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(prefill.post, "/v1/prefill", own)
        wait_until(lambda: prefill.total("headrace_open_requests") == len(LENGTHS) + 1, 10, "it is open")
        stop(prefill, signal.SIGTERM)
        prefill.process.send_signal(signal.SIGTERM)
    assert {each.outcome for each in site.asked.results()} == {"503 draining"}
    assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "draining")
    site.gone(prefill, 128 + signal.SIGTERM, children)
    settled(decode)


@pytest.mark.full
def test_a_drained_decode_server_ends_its_texts_and_gives_back_what_is_held_for_it(site: Site) -> None:
    prefill, decode = site.ready()
    site.pair.network.slow(SLOW)
    site.ask()
    site.in_flight()
    children = decode.children()
    stop(decode, signal.SIGTERM)
    prompt = {"prompt": list(site.prompt(90)), "max_tokens": 1}
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    held = prefill.post("/v1/completions", {**prompt, "kv_transfer_params": params})
    assert held.status_code == 200, held.text
    there = {**prompt, "kv_transfer_params": held.json()["kv_transfer_params"]}
    assert prefill.total("headrace_held_requests") == 1
    assert decode.post("/v1/completions", there).json()["error"]["code"] == "draining"
    wait_until(lambda: prefill.total("headrace_held_requests") == 0, 5, "before the lease ends")
    right(site.asked.results())
    site.gone(decode, 0, children)
    settled(prefill)


@pytest.mark.full
def test_a_second_signal_to_a_decode_server(site: Site) -> None:
    """Streams of every kind end with an error event, and the prefill server is told what is not wanted any more."""
    prefill, decode = site.ready()
    streams = [
        site.stream("/v1/completions", prompt=site.prompt(20), **ENDLESS),
        site.stream("/v1/chat/completions", messages=[{"role": "user", "content": "Go on."}], **ENDLESS),
        site.stream("/generate", input_ids=site.prompt(20), **GENERATE),
    ]
    site.pair.network.slow(STOPPED)
    site.ask()
    site.in_flight()
    children = decode.children()
    stop(decode, signal.SIGINT)
    decode.process.send_signal(signal.SIGTERM)
    assert [stream.error()["code"] for stream in streams] == ["draining"] * 3
    decode.process.send_signal(signal.SIGINT)  # one more changes nothing
    assert {each.outcome for each in site.asked.results()} == {"503 draining"}
    site.gone(decode, 128 + signal.SIGTERM, children)
    site.pair.clear()
    settled(prefill)
    failures = {name for name, value in prefill.metrics().items() if "request_failures_total" in name and value}
    assert not any("peer_gone" in name for name in failures), "it was told before the session ended"
