"""What becomes of a prompt when a part of the chain fails or is started again, and what is left: make test-sglang.

The right tokens or a clear error within a bound at both sides, engine and gateway alive, no page held. A prompt takes
as long as a test needs: the prefill server is stopped (SIGSTOP) meanwhile.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, running, serving, stopped, wait_until
from tests.engine.models import Saved
from tests.gateway.sglang_engine.engine import Sglang, answered, serving_sglang
from tests.gateway.sglang_engine.llama import ENGINE, asked, greedy, prefill_flags, prompt
from tests.gateway.sglang_engine.site import PAGE, Site, gateway_flags, gateway_of
from tests.gateway.sglang_nixl.prefill_side import bootstrap_port

pytestmark = pytest.mark.sglang

GENERATE = "/generate"
BOUND_S = 60.0  # the engine's own timeout is 300 s
NOTICED_S = 90.0  # two checks of the engine's, and what comes after
SETUP = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")  # all -1: a question for the set-up
ENGINE_FLAGS = (*ENGINE, "--page-size", str(PAGE))


@pytest.fixture(scope="module")
def engine(llama: Saved) -> Iterator[Sglang]:
    with serving_sglang(llama.folder, *ENGINE_FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def prefill(llama: Saved) -> Iterator[Server]:
    with serving(*prefill_flags(llama)) as made:
        yield made


@contextmanager
def soon(bound_s: float = BOUND_S) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < bound_s


class Tokens:
    """Prompts, each of them another one, and what transformers makes of them."""

    def __init__(self, model: Saved) -> None:
        self._model = model
        self._seed = 0

    def body(self, length: int = 100, **sampling: Any) -> dict[str, Any]:
        self._seed += 1
        return asked(prompt(length, self._seed), **sampling)

    def right(self, body: dict[str, Any], answer: dict[str, Any]) -> bool:
        return bool(answer["output_ids"] == greedy(self._model, body["input_ids"]))

    def work(self, site: Site, engine: Sglang | None = None) -> None:
        """A prompt comes through."""
        body = self.body()
        assert self.right(body, answered(site.ask(GENERATE, body, engine)))

    def until_they_work(self, site: Site, engine: Sglang) -> int:
        """Ask until the tokens are right, which has to come soon; each answer before is a clear error. Returns their
        number."""
        body, deadline, failed = self.body(), time.monotonic() + NOTICED_S, 0
        while True:
            first, second = site.both(GENERATE, body, engine)
            if first.status_code == second.status_code == 200:
                assert self.right(body, second.json())
                return failed
            assert first.status_code in (200, 499, 502, 503, 504), first.text
            assert second.json(), "a reason"
            assert time.monotonic() < deadline, f"{first.text}\n{second.text}\n{site.gateway.log}"
            failed += 1
            time.sleep(0.5)


@pytest.fixture(scope="module")
def tokens(llama: Saved) -> Tokens:
    return Tokens(llama)


def posted(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{GENERATE}", json=body, timeout=120, trust_env=False)


def impatient(url: str, body: dict[str, Any]) -> httpx.Response | None:
    """A client that hangs up after 3 s: None, or the answer that came before."""
    try:
        return httpx.post(f"{url}{GENERATE}", json=body, timeout=httpx.Timeout(60, read=3.0), trust_env=False)
    except httpx.ReadTimeout:
        return None


def left(url: str, body: dict[str, Any]) -> None:
    """A client that hangs up."""
    assert impatient(url, body) is None


def open_rooms(site: Site) -> float:
    return site.gateway.metrics()["headrace_gateway_rooms_open"]


@pytest.mark.parametrize("who", ["both", "engine", "gateway"])
def test_clients_that_leave_while_the_prompt_is_computed(site: Site, tokens: Tokens, who: str) -> None:
    """The one that stays is told by the other side, long before its own timeout. Of both the one that leaves a moment
    later may be."""
    tokens.work(site)
    before, body = site.rooms(), site.named(tokens.body())
    with ThreadPoolExecutor(2) as pool, soon(), stopped(site.prefills[0]):
        asked = [
            pool.submit(impatient if who in ("both", name) else posted, url, body)
            for name, url in (("gateway", site.gateway.url), ("engine", site.engine.url))
        ]
        answers = [each.result() for each in asked]
    assert None in answers
    assert [answer.text for answer in answers if answer is not None and answer.status_code < 400] == []
    site.quiet()
    assert sum(site.rooms().values()) - sum(before.values()) == 1, "a room counts once"
    tokens.work(site)


def test_a_client_that_leaves_while_the_engine_decodes(site: Site, tokens: Tokens) -> None:
    body = site.named(tokens.body(300, max_new_tokens=3500))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(posted, site.gateway.url, body)
        left(site.engine.url, body)
        assert answered(first.result())
    with soon():
        site.quiet()
    tokens.work(site)


def test_bodies_that_are_refused_end_at_the_engine_too(site: Site, tokens: Tokens) -> None:
    one = tokens.body()
    bodies: list[tuple[dict[str, Any], int]] = [
        (tokens.body(n=2), 400),
        ({**one, "input_ids": [one["input_ids"], one["input_ids"][:7]]}, 400),
        ({**one, "model": "m:adapter"}, 404),
        ({**one, "nonsense": 1}, 400),
    ]
    before = site.rooms()
    for body, status in bodies:
        with soon():
            first, second = site.both(GENERATE, body)
        assert first.status_code == status, first.text
        assert second.status_code >= 400, second.text
    assert site.rooms()["aborted"] == before["aborted"]
    tokens.work(site)


def test_a_prefill_server_that_is_killed(llama: Saved, engine: Sglang, tokens: Tokens) -> None:
    victim = Server(*prefill_flags(llama)).started()
    with gateway_of((engine,), (victim,)) as site, ThreadPoolExecutor(1) as pool:
        tokens.work(site)
        with stopped(victim):
            both = pool.submit(site.both, GENERATE, tokens.body())
            wait_until(lambda: open_rooms(site) == 1, 60, "it is asked")
            victim.kill()
            with soon():
                first, second = both.result()
        assert first.status_code in (502, 503), first.text
        assert second.status_code >= 400, second.text
        site.quiet()
        with running(Server(*prefill_flags(llama), port=victim.port)):
            wait_until(site.gateway.ready, 60, "it is found again")
            tokens.work(site)


def test_a_gateway_that_is_killed_while_two_engines_know_it(
    llama: Saved, engine: Sglang, prefill: Server, tokens: Tokens
) -> None:
    """Both have to register again at the one that is started in its place: the first that asks it keeps the other one
    from nothing."""
    port, http = bootstrap_port(), free_port()
    with serving_sglang(llama.folder, *ENGINE_FLAGS) as second, ThreadPoolExecutor(2) as pool:
        doomed = Server(*gateway_flags((engine, second), (prefill,), port), command="gateway", port=http).started()
        site = Site((prefill,), doomed, (engine, second), port)
        for one in site.engines:
            tokens.work(site, one)
        with stopped(prefill):
            waiting = [pool.submit(posted, one.url, site.named(tokens.body())) for one in site.engines]
            wait_until(lambda: open_rooms(site) == 2, 60, "both have asked for their rooms")
            doomed.kill()
        with ExitStack() as stack:
            with engine.stopped(), second.stopped():  # else they might notice while none listens
                again = stack.enter_context(gateway_of(site.engines, (prefill,), port=port, http=http))
                route = f"http://127.0.0.1:{port}/route"
                httpx.get(route, params=dict.fromkeys(SETUP, -1), trust_env=False).raise_for_status()
            failed = [tokens.until_they_work(again, one) for one in again.engines]
            assert max(failed) > 0, "or the test shows nothing"
            assert [each.result().text for each in waiting if each.result().status_code < 400] == []
            bodies = [tokens.body(200 + 100 * number) for number in range(4)]
            engines = again.engines * 2
            answers = pool.map(lambda body, one: answered(again.ask(GENERATE, body, one)), bodies, engines)
            assert all(map(tokens.right, bodies, answers))
            again.quiet()


def test_an_engine_that_is_killed_and_what_is_started_in_its_place(
    llama: Saved, prefill: Server, tokens: Tokens
) -> None:
    """While its prompt is computed. One with other pages is refused, and lives; one of the same kind is served."""
    victim = Sglang(llama.folder, *ENGINE_FLAGS).wait_ready()
    with gateway_of((victim,), (prefill,)) as site, ThreadPoolExecutor(2) as pool:
        tokens.work(site)
        body = site.named(tokens.body())
        with stopped(prefill):
            second = pool.submit(posted, victim.url, body)
            wait_until(lambda: open_rooms(site) == 1, 60, "it has asked for its room")
            first = pool.submit(posted, site.gateway.url, body)
            victim.kill()
        assert first.result().status_code in (502, 504), first.result().text
        with pytest.raises(httpx.TransportError):
            second.result()
        site._replace(engines=()).quiet()
        with serving_sglang(llama.folder, *ENGINE, "--page-size", "1", port=victim.port) as other:
            for _ in range(2):
                with soon():
                    first_answer, second_answer = site.both(GENERATE, tokens.body(), other)
                assert (first_answer.status_code, first_answer.json()["error"]["code"]) == (502, "unfit")
                assert "a page has 256 bytes" in second_answer.text
                assert "4096 here (page size 16," in second_answer.text
            assert other.process.poll() is None
        with serving_sglang(llama.folder, *ENGINE_FLAGS, port=victim.port) as again:
            tokens.work(site, again)
    victim.close()
