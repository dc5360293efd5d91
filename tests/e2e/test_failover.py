"""Prefill servers of a decode server that die, stop, drain, are overloaded or demand another key: no request fails.

One decode server and four prefill servers. The first one is killed, stopped or drained; the second one is sound; the
third one has room for one request; the fourth one demands a key that the decode server does not have, and is never up.
"""

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import httpx
import pytest

from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.models import NAME, Model, stub

TOKENS = 6
LENGTHS = (900, 70, 500, 1300, 33, 700, 210, 1000, 5, 400, 800, 129)
FLAGS = ("--role", "prefill", "--chunk-tokens", "128", "--kv-pages", "256", "--page-size", "32")
KEY = "not-known-to-the-decode-server"

pytestmark = pytest.mark.full


class Fleet:
    """A decode server and its prefill servers."""

    def __init__(self, model: Model, decode: Server, victim: Server, sound: Server, small: Server) -> None:
        self.model = model
        self.decode = decode
        self.victim = victim
        self.sound = sound
        self.small = small
        self.wanted: list[str] = []

    def texts(self, seed: int) -> list[Future[str]]:
        """Ask for the texts of prompts, half of them as streams; no prompt has a cached prefix."""
        story = self.model.story()
        prompts = [(story[seed + number], *story[seed:][: length - 1]) for number, length in enumerate(LENGTHS)]
        self.wanted = [self.model.greedy_text(prompt, TOKENS) for prompt in prompts]
        pool = ThreadPoolExecutor(len(prompts))
        return [pool.submit(self._text, prompt, number % 2 > 0) for number, prompt in enumerate(prompts)]

    def check(self, asked: list[Future[str]]) -> None:
        """All texts are right, and nothing is left at servers that live."""
        self.check_texts(asked)
        self.check_settled()

    def check_texts(self, asked: list[Future[str]]) -> None:
        """All texts are right."""
        assert [one.result(120) for one in asked] == self.wanted

    def check_settled(self) -> None:
        """Nothing is left at servers that live."""
        for server in (self.decode, self.sound, self.small):
            wait_until(lambda server=server: settled(server), 30, f"nothing left\n{server.log}")
        assert "Traceback" not in self.decode.log

    def moved(self) -> float:
        """Prompts that went to another server so far."""
        return self.decode.total("headrace_prefill_retries_total")

    def _text(self, prompt: tuple[int, ...], stream: bool) -> str:
        body = {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        response = httpx.post(f"{self.decode.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        assert "error" not in response.text
        if not stream:
            assert response.json()["usage"]["prompt_tokens"] == len(prompt)
            return str(response.json()["choices"][0]["text"])
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def settled(server: Server) -> bool:
    """No page, row, ticket or request is left."""
    values = server.metrics()
    queued = sum(value for name, value in values.items() if name.startswith("headrace_queue_requests"))
    rest = ("metadata_rows_in_use", "reservations_waiting", "quarantined_pages", "integrity_errors")
    return pages_in_use(server) == queued == sum(values.get(f"headrace_{name}", 0) for name in rest) == 0


@contextmanager
def fleet_of(model: Model) -> Iterator[Fleet]:
    with (
        closing(Server(*FLAGS, *model.flags)) as victim,
        closing(Server(*FLAGS, *model.flags)) as sound,
        closing(Server(*FLAGS, *model.flags, "--max-queued-requests", "1")) as small,
        closing(Server(*FLAGS, *model.flags, "--api-key", KEY)) as locked,
    ):
        prefills = [flag for server in (victim, sound, small, locked) for flag in ("--prefill", server.url)]
        fleet = Fleet(model, Server("--role", "decode", *prefills, *model.flags), victim, sound, small)
        try:
            victim.started()
            with running(sound), running(small), running(locked), running(fleet.decode):
                known(fleet, 3)
                yield fleet
        finally:
            print(fleet.victim.log)
            fleet.victim.kill()


def known(fleet: Fleet, count: int) -> None:
    """Wait until the decode server has sessions with so many prefill servers."""
    wait_until(lambda: fleet.decode.total("headrace_prefill_servers") == count, 30, f"{count} servers are known")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with fleet_of(stub(us_per_token=1000)) as made:
        yield made


MOMENTS: dict[str, Callable[[Server], bool]] = {
    "waiting": lambda server: server.metrics()['headrace_queue_requests{queue="waiting"}'] > 0,
    "computing": lambda server: pages_in_use(server) > 0,
    "transferring": lambda server: server.total("headrace_bytes_sent_total") > 0,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_server(fleet: Fleet, moment: str) -> None:
    port, before = fleet.victim.port, fleet.moved()
    asked = fleet.texts(seed=100 * list(MOMENTS).index(moment))
    wait_until(lambda: MOMENTS[moment](fleet.victim), 30, moment)
    fleet.victim.kill()
    fleet.check(asked)
    assert fleet.moved() > before
    known(fleet, 2)
    fleet.victim = Server(*FLAGS, *fleet.model.flags, port=port).started()
    known(fleet, 3)


def test_a_stopped_server(fleet: Fleet) -> None:
    """Its session ends after --peer-timeout. Pages that it could still write into come back when it goes on."""
    asked = fleet.texts(seed=1000)
    wait_until(lambda: pages_in_use(fleet.victim) > 0, 30, "the prefill has begun")
    processes = [*fleet.victim.children(), fleet.victim.process]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        fleet.check_texts(asked)
        known(fleet, 2)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    fleet.check_settled()
    wait_until(lambda: settled(fleet.victim), 30, "tickets are gone")
    known(fleet, 3)


def test_a_draining_server(fleet: Fleet) -> None:
    """What it has goes on to its end; what comes goes elsewhere, until it is down."""
    asked = fleet.texts(seed=2000)
    wait_until(lambda: pages_in_use(fleet.victim) > 0, 30, "the prefill has begun")
    fleet.victim.process.send_signal(signal.SIGTERM)
    fleet.check(asked)
    assert fleet.victim.ended() == 0, fleet.victim.log
    port = fleet.victim.port
    fleet.victim.close()
    fleet.victim = Server(*FLAGS, *fleet.model.flags, port=port).started()
    known(fleet, 3)


def test_an_overloaded_server(fleet: Fleet) -> None:
    for seed in (3000, 4000):
        fleet.check(fleet.texts(seed))
    values = fleet.decode.metrics()
    assert values['headrace_prefill_retries_total{reason="overloaded"}'] > 0
    assert fleet.decode.total("headrace_prefill_servers") == 3, "the one with the other key gets no prompt"
    assert values['headrace_prefill_retried_requests_total{outcome="failed"}'] == 0
    assert values['headrace_prefill_retried_requests_total{outcome="finished"}'] > 0
