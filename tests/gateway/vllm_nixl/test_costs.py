"""--remote of a gateway before a stock vLLM: what stays with the engine has its text, and nothing of it is loaded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.vllm_server import Vllm
from headrace.core.types.requests.remote_prefill import PREFILL_REASONS
from headrace.gateway.vllm.placement import LOOK_S
from headrace.server.upstream.server_watch import POLL_S
from tests.e2e.harness import Server, wait_until
from tests.gateway.vllm_nixl.fleet import Site, gateway_of
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, check, fresh, own
from tests.integrations.vllm.sides import prompt
from tests.routers.fleet import Router, routed
from tests.routers.test_texts import texts

pytestmark = pytest.mark.vllm

LENGTH = 300


@contextmanager
def gateway(vllm: Vllm, prefill: Server, *flags: str) -> Iterator[tuple[Site, Router]]:
    """A gateway behind a router, which knows what computing costs its prefill server."""
    with gateway_of((vllm,), (prefill,), *flags) as site, routed("vllm-nixl", site) as router:
        router.post(COMPLETION, fresh({**GREEDY, "prompt": prompt(LENGTH, at=1100)}))
        wait_until(lambda: prefill.get("/v1/handoff").json()["load"]["trusted"], 10, "a cost model")
        time.sleep(2 * (LOOK_S + POLL_S))
        yield site, router


def decisions(site: Site) -> dict[str, float]:
    """Prompts by reason."""
    found = site.gateway.metrics()
    return {
        reason: found[f'headrace_gateway_prefill_decisions_total{{reason="{reason}"}}'] for reason in PREFILL_REASONS
    }


@pytest.mark.parametrize(("rate", "reason", "loaded"), [(1e6, "cheaper_here", 0), (10.0, "cheaper_there", LENGTH)])
def test_prompts_go_where_they_cost_less(vllm: Vllm, prefill: Server, rate: float, reason: str, loaded: int) -> None:
    """By the rate that the engine is said to have."""
    with gateway(vllm, prefill, "--remote", "cost", "--decode-prefill-rate", str(rate)) as (site, router):
        before = decisions(site)
        check(site, router, COMPLETION, {"prompt": prompt(LENGTH, at=1200)}, loaded)
        assert decisions(site) == {**before, reason: before[reason] + 2}, "whole and as a stream"


def test_the_rate_of_an_engine_is_learnt_from_what_it_computes(vllm: Vllm, prefill: Server) -> None:
    with gateway(vllm, prefill, "--remote", "cost") as (site, router):
        unknown = decisions(site)["unknown_cost"]
        assert unknown >= 1
        for number in range(3):
            own(vllm, COMPLETION, {**GREEDY, "prompt": prompt(LENGTH, at=1300 + number)})
        time.sleep(2 * LOOK_S + 0.5)
        body = {**GREEDY, "prompt": prompt(LENGTH, at=1400)}
        assert texts(router.post(COMPLETION, fresh(body))) == own(vllm, COMPLETION, body)
        found = decisions(site)
        assert found["unknown_cost"] == unknown
        assert sum(found.values()) == unknown + 1


def test_never_leaves_every_prompt_to_the_engine(vllm: Vllm, prefill: Server) -> None:
    with gateway_of((vllm,), (prefill,), "--remote", "never") as site, routed("vllm-nixl", site) as router:
        before = prefill.total("headrace_prompt_tokens_total")
        check(site, router, COMPLETION, {"prompt": prompt(LENGTH, at=1500)}, 0)
        assert prefill.total("headrace_prompt_tokens_total") == before
