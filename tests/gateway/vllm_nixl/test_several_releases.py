"""vLLM's of several releases behind one gateway: each loads all KV and gives its own texts, also one that comes back as
another release.

HEADRACE_VLLM_RELEASES names their environments, as make test-vllm does: folders, with spaces between them.
"""

import os
import signal
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


@pytest.fixture(scope="module")
def releases(folder: Callable[[str], Path]) -> Iterator[dict[str, Vllm]]:
    """By their versions, one of each, started one after the other: an idle NixlConnector keeps a core busy."""
    with ExitStack() as stack:
        made: dict[str, Vllm] = {}
        for python in PYTHONS:
            engine = stack.enter_context(closing(stock(folder("float32"), python=python)))
            engine.wait_ready()
            made[engine.client.get("/version").json()["version"]] = engine
        assert len(made) == len(PYTHONS)
        yield made


@pytest.fixture(scope="module")
def together(releases: dict[str, Vllm], prefill: Server) -> Iterator[Site]:
    """All of them behind one gateway."""
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
        before = engine.loaded_tokens()
        body = {**GREEDY, "prompt": prompt(length, at=length)}
        expected = own(engine, COMPLETION, body)
        assert texts(through.post(COMPLETION, fresh(body))) == expected
        wait_until(
            lambda before=before, length=length: engine.loaded_tokens() - before == length, 5, f"{length} loaded"
        )
