"""Several decode engines, several prefill servers, and pipeline stages, behind one gateway: make test-vllm."""

import pytest

from benchmarks.vllm_server import Vllm
from tests.e2e.harness import Server, serving, wait_until
from tests.gateway.vllm_nixl.fleet import PREFILL, Example, Site, gateway_of
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, check, fresh, loaded, own
from tests.integrations.vllm.sides import background, loads, prompt
from tests.routers.fleet import routed
from tests.routers.test_texts import texts

pytestmark = pytest.mark.vllm
PROMPTS = 4


def sent(server: Server, backend: str = "shm") -> float:
    """Bytes of KV that a prefill server has sent by a transfer backend."""
    return server.metrics()[f'headrace_bytes_sent_total{{backend="{backend}"}}']


def test_two_engines_and_two_prefill_servers(vllm: Vllm, second: Vllm, prefill: Server) -> None:
    """The router chooses the engine after the gateway has answered; every one can read every offer."""
    bodies = [{**GREEDY, "prompt": prompt(300, at=1000 + 10 * number)} for number in range(PROMPTS)]
    expected = [own(vllm, COMPLETION, body) for body in bodies]
    with serving(*PREFILL) as other, gateway_of((vllm, second), (prefill, other), "--routing", "least-load") as site:
        with routed("vllm-nixl", site, "--policy", "round_robin") as router, background() as pool:
            before = [engine.loaded_tokens() for engine in site.decodes]
            served = [sent(server) for server in site.prefills]
            answers = pool.map(lambda body: router.post(COMPLETION, fresh(body)), bodies)
            assert [texts(answer) for answer in answers] == expected
        site.quiet()
        taken = [engine.loaded_tokens() - was for engine, was in zip(site.decodes, before, strict=True)]
        assert sum(taken) == PROMPTS * 300
        assert min(taken) > 0, "one engine has served all of them"
        assert all(sent(server) > was for server, was in zip(site.prefills, served, strict=True))


@pytest.mark.parametrize("length", [1, 129, 2000])
def test_pipeline_stages_write_their_layers(staged: Site, length: int) -> None:
    check(staged, Example(staged), COMPLETION, {"prompt": prompt(length, at=1100)}, loaded(length))
    staged.quiet()


def test_stages_write_into_the_gateways_memory(site: Site) -> None:
    """KV goes by shared memory, and by nothing else."""
    (prefill,) = site.prefills
    ids = prompt(700, at=1200)
    before, frames = sent(prefill), sent(prefill, "zmq")
    with loads(site.decode, 700):
        Example(site).post(COMPLETION, {**GREEDY, "prompt": ids})
    least = 700 * 30 * 2 * 3 * 64 * 4  # tokens × layers × K and V × heads × head size × bytes
    wait_until(lambda: sent(prefill) - before >= least, 5, "stages have reported what they have sent")
    assert sent(prefill, "zmq") == frames
