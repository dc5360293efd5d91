"""What becomes of a prompt when a part of the chain fails, and what is left of it: make test-vllm.

The table of docs/vllm.md, row by row: the right text or a clear error within five seconds, vLLM alive, nothing held.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.vllm_server import Vllm
from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.gateway.vllm_nixl.fleet import ASKED, PREFILL, Example, Site, gateway_flags, gateway_of, refused
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, fresh, own
from tests.integrations.vllm.sides import background, leave, loads, prompt
from tests.routers.fleet import Router
from tests.routers.test_texts import texts

pytestmark = pytest.mark.vllm

BOUND_S = 5.0
HANDSHAKE_S = 5.0  # for which vLLM waits
LEASE_S = 4.0
CHUNKED = (*PREFILL, "--chunk-tokens", "128")
SENT = "headrace_chunks_sent_total"


@contextmanager
def soon(bound_s: float = BOUND_S) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < bound_s


def timed_own(vllm: Vllm, asked: dict[str, Any]) -> tuple[dict[int, str], float]:
    """What a vLLM says to it without a gateway, and the seconds that it takes: as many as it takes when KV is lost."""
    begin = time.monotonic()
    expected = own(vllm, COMPLETION, asked)
    return expected, time.monotonic() - begin


def body(length: int, at: int) -> dict[str, Any]:
    return fresh({**GREEDY, "prompt": prompt(length, at=at)})


@pytest.fixture(scope="module")
def brief(vllm: Vllm, prefill: Server) -> Iterator[Site]:
    """Offers end soon, and the pool has place for two prompts of the tests."""
    flags = ("--lease", f"{LEASE_S:g}", "--pool-tokens", "768")
    with gateway_of((vllm,), (prefill,), *flags) as made:
        yield made


@pytest.mark.parametrize("fallback", ["error", "recompute"])
def test_a_prefill_server_that_is_gone(vllm: Vllm, fallback: str) -> None:
    """error: the router and the client get it. recompute: the same text. Afterwards KV is loaded again."""
    victim = Server(*PREFILL).started()
    with gateway_of((vllm,), (victim,), "--fallback", fallback) as site:
        asked = body(300, at=0)
        expected = own(vllm, COMPLETION, asked)
        victim.kill()
        if fallback == "error":
            with soon():
                answer = Example(site).post(COMPLETION, asked)
            assert answer.status_code in (502, 503), answer.text
            assert answer.json()["error"]["message"]
        else:
            before = site.recomputed("prefill_failed")
            with loads(vllm, 0), soon():
                assert Example(site).params(COMPLETION, asked) == {}
            assert texts(Example(site).second(COMPLETION, asked, {})) == expected
            assert site.recomputed("prefill_failed") == before + 1
        site.quiet()
        with running(Server(*PREFILL, port=victim.port)) as again:
            back = Site((again,), site.gateway, site.decodes)
            wait_until(site.gateway.ready, 20, "it is found again")
            with loads(vllm, 300):
                assert texts(Example(back).post(COMPLETION, fresh(asked))) == expected
            back.quiet()


@pytest.mark.parametrize("fallback", ["error", "recompute"])
def test_a_prefill_server_that_dies_while_it_computes(vllm: Vllm, fallback: str) -> None:
    victim = Server(*CHUNKED).started()
    with gateway_of((vllm,), (victim,), "--fallback", fallback) as site, background() as pool:
        asked = body(2000, at=20)
        first = pool.submit(Example(site).first, COMPLETION, asked)
        wait_until(lambda: victim.metrics()[SENT] > 1, 30, "some of it has come")
        victim.kill()
        with soon():
            answer = first.result()
        assert answer.status_code == (502 if fallback == "error" else 200), answer.text
        assert "kv_transfer_params" not in answer.json()
        site.quiet()


def test_another_prefill_server_takes_over(vllm: Vllm) -> None:
    """Whichever is chosen first dies while it computes, and the other one serves the same request."""
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(Server(*CHUNKED))) for _ in range(2)]
        for server in servers:
            server.started()
        site = stack.enter_context(gateway_of((vllm,), servers))
        pool = stack.enter_context(background())
        asked = body(1500, at=30)
        before = {server: server.metrics()[SENT] for server in servers}
        with loads(vllm, 1500):
            answer = pool.submit(Example(site).post, COMPLETION, asked)
            begun = lambda: [server for server in servers if server.metrics()[SENT] > before[server] + 1]  # noqa: E731
            wait_until(begun, 30, "some of it has come")
            begun()[0].kill()
            assert texts(answer.result()) == own(vllm, COMPLETION, asked)
        site.quiet()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_gateway_that_dies_between_its_answer_and_the_read(vllm: Vllm, prefill: Server, known: bool) -> None:
    """vLLM computes the prompt: at once if it knows the gateway, after its own five seconds if it has to ask for a
    handshake. A gateway that is started in its place serves on."""
    first, *_ = (free_port() for _ in range(4))  # consecutive ones
    ports = ("--side-channel-port", str(first))
    asked = body(300, at=40)
    expected, compute_s = timed_own(vllm, asked)
    doomed = Server(*gateway_flags((vllm,), (prefill,)), *ports, command="gateway").started()
    site = Site((prefill,), doomed, (vllm,))
    if known:
        with loads(vllm, 256):
            Example(site).post(COMPLETION, body(256, at=45))
    params = Example(site).params(COMPLETION, asked)
    doomed.kill()
    with loads(vllm, 0), soon(compute_s + BOUND_S + (0 if known else HANDSHAKE_S)):
        assert texts(Example(site).second(COMPLETION, asked, params)) == expected
    site.quiet()
    flags = (*gateway_flags((vllm,), (prefill,)), *ports)
    with running(Server(*flags, port=doomed.port, command="gateway")) as again:
        back = Site((prefill,), again, (vllm,))
        with loads(vllm, 300):
            assert texts(Example(back).post(COMPLETION, fresh(asked))) == expected
        back.quiet()


def test_a_gateway_that_dies_while_it_is_asked(vllm: Vllm, prefill: Server) -> None:
    """The prefill server stops to compute for it, and frees its pages."""
    doomed = Server(*gateway_flags((vllm,), (prefill,)), command="gateway").started()
    site = Site((prefill,), doomed, (vllm,))
    with background() as pool:
        before = prefill.metrics()['headrace_bytes_sent_total{backend="shm"}']
        first = pool.submit(Example(site).first, COMPLETION, body(3500, at=50))
        wait_until(lambda: prefill.metrics()['headrace_bytes_sent_total{backend="shm"}'] > before, 30, "KV comes")
        doomed.kill()
        with soon(), pytest.raises(httpx.TransportError):
            first.result()
    with soon():
        site.quiet()


def test_a_client_that_leaves_while_its_prompt_is_computed(site: Site) -> None:
    (prefill,) = site.prefills
    before = prefill.metrics()['headrace_bytes_sent_total{backend="shm"}']
    left = threading.Event()
    with background() as pool:
        asked = pool.submit(leave, site.gateway.url, {**body(3500, at=60), "kv_transfer_params": ASKED}, left)
        wait_until(lambda: prefill.metrics()['headrace_bytes_sent_total{backend="shm"}'] > before, 30, "KV comes")
        left.set()
        asked.result()
        with soon():
            site.quiet()


def test_a_request_that_vllm_refuses(site: Site) -> None:
    """It tells the gateway so, and the pages are free long before the lease ends. (A vLLM that has not read from this
    gateway before tells it with the next request that it computes.)"""
    with loads(site.decode, 256):
        Example(site).post(COMPLETION, body(256, at=65))
    asked = body(300, at=70)
    params = Example(site).params(COMPLETION, asked)
    refused = Example(site).second(COMPLETION, {**asked, "max_tokens": 100_000}, params)
    assert refused.status_code == 400, refused.text
    with soon():
        site.quiet()


def test_an_answer_that_nobody_uses(brief: Site) -> None:
    """Its pages are free when the lease is over."""
    Example(brief).params(COMPLETION, body(300, at=80))
    assert pages_in_use(brief.gateway) == 3
    with soon(LEASE_S + BOUND_S):
        brief.quiet()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_lease_that_is_over(brief: Site, known: bool) -> None:
    """Never the text of what is in the pages now, whether vLLM knows the agent that offered them or not."""
    vllm, example = brief.decode, Example(brief)
    asked = body(300, at=90)
    expected, compute_s = timed_own(vllm, asked)
    if known:
        example.post(COMPLETION, body(256, at=95))
    params = example.params(COMPLETION, asked)
    wait_until(lambda: pages_in_use(brief.gateway) == 0, 10, "the lease is over")
    refill(brief)
    with loads(vllm, 0), soon(compute_s + BOUND_S + (0 if known else 3)):
        assert texts(example.second(COMPLETION, asked, params)) == expected
    brief.quiet()


def refill(site: Site) -> None:
    """Put other prompts into all pages."""
    for at in (2000, 2100):
        Example(site).params(COMPLETION, body(300, at=at))


def test_an_engine_that_is_stopped_for_longer_than_a_lease(brief: Site) -> None:
    """It has the request when it stops, and goes on when the pages have the KV of other prompts."""
    vllm, example = brief.decode, Example(brief)
    asked = body(300, at=100)
    expected = own(vllm, COMPLETION, asked)
    example.post(COMPLETION, body(256, at=105))
    params = example.params(COMPLETION, asked)
    with background() as pool, loads(vllm, 0):
        with vllm.stopped():
            second = pool.submit(example.second, COMPLETION, asked, params)
            wait_until(lambda: pages_in_use(brief.gateway) == 0, 10, "the lease is over")
            refill(brief)
        with soon():
            assert texts(second.result()) == expected
    brief.quiet()
    with loads(vllm, 300):
        assert texts(example.post(COMPLETION, fresh(asked))) == expected


def test_a_request_that_waits_keeps_its_lease(vllm: Vllm, prefill: Server) -> None:
    """vLLM gives a sign every five seconds, which is worth two thirds of a lease; more than one lease passes before it
    has room for the request."""
    lease_s = 12.0
    released = threading.Event()
    with gateway_of((vllm,), (prefill,), "--lease", f"{lease_s:g}") as site, background() as pool:
        asked = body(300, at=110)
        endless = {**GREEDY, "max_tokens": 3000, "stream": True}
        for at in range(4):
            pool.submit(leave, vllm.url, {**endless, "prompt": prompt(100, at=at)}, released)
        wait_until(lambda: vllm.metric("vllm:num_requests_running") == 4, 20, "no request of vLLM's is free")
        with loads(vllm, 300):
            waiting = pool.submit(Example(site).post, COMPLETION, asked)
            wait_until(lambda: pages_in_use(site.gateway) == 3, 60, "it is offered")
            time.sleep(lease_s + 1)
            assert not waiting.done(), "or the test shows nothing"
            released.set()
            found = texts(waiting.result())
        assert found == own(vllm, COMPLETION, asked)
        site.quiet()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "stub:layers=4,hidden=32", "--dtype", "float32"), ("head_dim: 32 at the prefill server", "64")),
        (("--model", "smollm2", "--dtype", "bfloat16"), ("float32", "bfloat16")),
    ],
    ids=["model", "dtype"],
)
def test_prefill_servers_of_another_model_or_dtype(vllm: Vllm, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    with running(Server("--role", "prefill", *flags)) as other:
        log = refused(*gateway_flags((vllm,), (other,)))
    assert all(word in log for word in words), log


def test_prefill_servers_with_other_weights(vllm: Vllm, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Name and geometry are the same; the first tokens are not."""
    shutil.copytree(folder("float32"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"].neg_()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with running(Server("--role", "prefill", "--model", str(tmp_path), "--dtype", "float32")) as other:
        log = refused(*gateway_flags((vllm,), (other,)))
    assert f"the model of prefill server {other.url} is not that of decode engine {vllm.url}" in log


def test_an_engine_with_another_version_of_the_connector(versioned: Vllm, prefill: Server) -> None:
    log = refused(*gateway_flags((versioned,), (prefill,)))
    assert "version of NixlConnector: 15 at the decode engine; this gateway serves 14" in log
    assert versioned.text(prompt(40)) == versioned.alone(prompt(40))


def test_a_router_before_a_gateway_that_is_down(site: Site, router: Router) -> None:
    """A gateway that is told to end drains and ends with status 0: every fixture here does."""
    asked = body(128, at=120)
    with loads(site.decode, 128):
        assert texts(router.post(COMPLETION, asked)) == own(site.decode, COMPLETION, asked)
