"""A vLLM that is killed, and what is started in its place: make test-vllm."""

from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks.vllm_server import Vllm
from tests.e2e.harness import Server, pages_in_use, wait_until
from tests.gateway.vllm_nixl.conftest import awake
from tests.gateway.vllm_nixl.fleet import Example, gateway_flags, gateway_of, stock
from tests.gateway.vllm_nixl.test_faults import refused, soon
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, own
from tests.integrations.vllm.sides import loads, prompt
from tests.routers.test_texts import texts

pytestmark = pytest.mark.vllm


def test_a_vllm_that_is_killed_and_replaced(
    vllm: Vllm, second: Vllm, prefill: Server, folder: Callable[[str], Path]
) -> None:
    """Its leases end at once. One with blocks of another size is refused; one of the same kind is served again."""
    body = {**GREEDY, "prompt": prompt(300, at=1300)}
    with vllm.stopped(), gateway_of((second,), (prefill,)) as site:
        example = Example(site)
        expected = own(second, COMPLETION, body)
        example.params(COMPLETION, body)
        assert pages_in_use(site.gateway) == 3
        second.kill()
        with soon():
            wait_until(lambda: pages_in_use(site.gateway) == 0, 10, "its lease is over")
        with closing(stock(folder("float32"), "float32", "--block-size", "64", ports=second.ports)) as other:
            other.wait_ready()
            wait_until(lambda: "64" in site.gateway.get("/ready").text, 20, f"it is noticed\n{site.gateway.log}")
            answer = Example(site, other).post(COMPLETION, body)
            assert answer.status_code == 503 or texts(answer) == expected, answer.text
            with contextmanager(awake)(vllm):
                log = refused(*gateway_flags((vllm, other), (prefill,)))
            assert "64" in log
            assert "128" in log
        with closing(stock(folder("float32"), ports=second.ports)) as again:
            again.wait_ready()
            wait_until(lambda: site.gateway.ready(), 20, f"it is served again\n{site.gateway.log}")
            back = site._replace(decodes=(again,))
            with loads(again, 300):
                assert texts(Example(back).post(COMPLETION, {**body, "cache_salt": "again"})) == expected
            back.quiet()
