"""vLLM's of several releases behind one gateway: each loads all KV and gives its own texts, also one that comes back as
another release.

HEADRACE_VLLM_RELEASES names their environments, as make test-vllm does: folders, with spaces between them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from benchmarks.vllm_server import Vllm
from tests.e2e.harness import Server, wait_until
from tests.gateway.vllm_nixl.fleet import Example, Site, gateway_of, stock
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, fresh, own
from tests.integrations.vllm.sides import prompt
from tests.routers.test_texts import texts

PYTHONS = [Path(each, "bin/python") for each in os.environ.get("HEADRACE_VLLM_RELEASES", "").split()]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHONS, reason="HEADRACE_VLLM_RELEASES names no other release"),
    pytest.mark.usefixtures("others_stopped"),
]


def end(engine: Vllm) -> None:
    if engine.process.poll() is None:
        engine.close()


@pytest.fixture(scope="module")
def releases(folder: Callable[[str], Path]) -> Iterator[dict[str, Vllm]]:
    """By their versions, one of each, started one after the other: an idle NixlConnector keeps a core busy."""
    with ExitStack() as stack:
        made: dict[str, Vllm] = {}
        for python in PYTHONS:
            engine = stock(folder("float32"), python=python)
            stack.callback(end, engine)
            engine.wait_ready()
            made[engine.client.get("/version").json()["version"]] = engine
            engine.signal(signal.SIGSTOP)
        assert len(made) == len(PYTHONS)
        yield made


@pytest.fixture(scope="module")
def together(releases: dict[str, Vllm], prefill: Server) -> Iterator[Site]:
    """All of them behind one gateway."""
    for engine in releases.values():
        engine.signal(signal.SIGCONT)
    with gateway_of(tuple(releases.values()), (prefill,)) as made:
        yield made


def alone(releases: dict[str, Vllm], engine: Vllm) -> None:
    """No other engine runs, so that this one has its cores."""
    for each in releases.values():
        each.signal(signal.SIGCONT if each is engine else signal.SIGSTOP)


@pytest.mark.parametrize("number", range(len(PYTHONS)))
def test_each_loads_all_and_gives_its_own_texts(releases: dict[str, Vllm], together: Site, number: int) -> None:
    engine = list(releases.values())[number]
    alone(releases, engine)
    wait_until(lambda: together.gateway.request("GET", "/ready").status_code == 200, 20, "the gateway is ready")
    through = Example(together, engine)
    for at in range(len(PYTHONS)):  # all have one address: the gateway tries their hashes in turn
        body = {**GREEDY, "prompt": prompt(40, at=30 * at)}
        assert texts(through.post(COMPLETION, fresh(body))) == own(engine, COMPLETION, body)
    for length in (7, 65, 128, 300):
        body = {**GREEDY, "prompt": prompt(length, at=length)}
        expected, before = own(engine, COMPLETION, body), engine.loaded_tokens()
        for _ in PYTHONS:  # the gateway's NIXL agent may have been replaced meanwhile
            assert texts(through.post(COMPLETION, fresh(body))) == expected
            time.sleep(0.5)  # the metric is behind by a step
            if (loaded := engine.loaded_tokens() - before) > 0:
                break
        assert loaded == length


@pytest.mark.skipif(len(PYTHONS) < 2, reason="one release is none to upgrade to")
def test_an_upgrade_under_load_costs_no_request(
    releases: dict[str, Vllm], together: Site, folder: Callable[[str], Path]
) -> None:
    """An engine ends and comes back at its address as another release, while requests go to the one beside it."""
    versions = list(releases)
    stays, leaves = releases[versions[0]], releases[versions[1]]
    alone(releases, stays)
    body = {**GREEDY, "prompt": prompt(90, at=700)}
    expected = own(stays, COMPLETION, body)
    through, answers, over = Example(together, stays), [], threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(through.post(COMPLETION, fresh(body)))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        leaves.signal(signal.SIGCONT)
        leaves.close()
        with closing(stock(folder("float32"), python=PYTHONS[0], ports=leaves.ports)) as upgraded:
            upgraded.wait_ready()
            newer = upgraded.client.get("/version").json()["version"]
            wait_until(lambda: f"{upgraded.url} is up" in together.gateway.log, 30, "it is known")
            again = Example(together, upgraded)
            for _ in releases:  # all have one address: hashes are tried in turn
                assert texts(again.post(COMPLETION, fresh(body))) == expected
            wait_until(lambda: upgraded.loaded_tokens() > 0, 10, "it loads")
            assert newer == versions[0]
    finally:
        over.set()
        asking.join()
    assert len(answers) > 5
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert texts(answer) == expected
