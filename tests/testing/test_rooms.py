"""Requests that a router sends to both servers at once: their prompts wait for a decode server that queues them."""

from collections import Counter
from typing import Any

from headrace.testing.scenario import Scenario
from headrace.testing.simulator import simulate

QUIET = {"cancel": 0.0, "abandon": 0.0, "lost_peer": 0.0, "crash": 0.0, "hold": 0.0, "small": True}


def run(first: int, count: int, requests: int, **changes: Any) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + count):
        report = simulate(Scenario(seed, "pair", requests, rooms=1.0, **changes))
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        outcomes.update(report.outcomes)
    return outcomes


def test_prompts_wait_for_as_long_as_their_peer_queues_them() -> None:
    """A decode server takes many times as long for them as a prompt waits for a peer that is silent."""
    outcomes = run(0, 6, 40, token_s=0.05, arrivals_s=0.01, **QUIET)
    assert outcomes["prefill:handoff"] > 50
    unheard = outcomes["decode:no_prefill"] + outcomes["decode:not_ready"]  # refused before it could tell a peer
    assert outcomes["prefill:no_peer"] <= unheard < 30


def test_whatever_happens_a_prompt_waits_until_its_peer_is_silent() -> None:
    """The virtual servers check it: see "room" in PromiseGuard."""
    outcomes = run(1000, 60, 8, cancel=0.3, abandon=0.2, lost_peer=0.5, stall=0.05)
    assert {"decode:stop", "decode:length", "decode:cancelled", "decode:no_request", "decode:peer_gone"} <= set(
        outcomes
    )


def test_prompts_with_several_peers() -> None:
    outcomes = run(2000, 10, 16, dp=2, cancel=0.3, lost_peer=0.3)
    assert outcomes["prefill:handoff"]
