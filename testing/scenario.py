"""Scenarios of the simulator, and the configurations of servers that are drawn for them."""

import random
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.config.scheduler import Policy, PromiseLevel
from headrace.testing.engine import VOCABULARY

Shape = Literal["colocated", "pair"]
POLICIES: tuple[Policy, ...] = ("srpt", "fcfs", "slo")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate."""

    seed: int
    shape: Shape = "colocated"
    requests: int = 12
    arrivals_s: float = 0.01
    """Mean time between two requests."""

    token_s: float = 0.0005
    """Seconds that a stage takes for a token."""

    cancel: float = 0.3
    """Probability that a client goes away at some point."""

    stall: float = 0.0
    """Probability that a chunk never arrives."""

    abandon: float = 0.05
    """Probability that a prompt is not posted to the prefill server after it was reserved."""

    hold: float = 0.3
    """Probability that a prompt is held at the prefill server first, and fetched later."""

    rooms: float = 0.0
    """Probability that a router sends a request to both servers at once, and the decode server renews its ticket."""

    other_prompt: float = 0.0
    """Probability that what a router posts to the prefill server has one token more."""

    lost_peer: float = 0.2
    """Probability that the connection breaks in a run."""

    crash: float = 0.05
    """Probability that a stage fails in a run; the engine comes up again."""

    has_nan_token: bool = False
    """KV of NAN_TOKEN, and of all positions after it, is NaN."""

    tiers: bool = False
    """Servers have host and disk tiers of random sizes."""

    tier_faults: float = 0.02
    """Probability that a page is not stored, not loaded, changed or lost there."""

    library: bool = False
    """Servers have KV files of what prompts begin with, which come and go."""

    states: bool = False
    """Requests have states: prefixes are cached at checkpoints, and the last chunk carries the state."""

    depth: int | None = None
    """Plans in flight beyond one per stage; None draws it. The requests are the same whatever it is."""

    prefills: int = 1
    """Prefill servers of a pair. With several, no router names one: hold is 0."""

    returns: float = 0.0
    """Probability that the decode server offers the KV of a turn back (with prefixes)."""

    resumes: float = 0.0
    """Probability that a prompt that is moved, and of which KV has come, takes that KV along to the next prefill
    server."""

    hedges: float = 0.0
    """Probability that a second prefill server is started on a prompt; the first token of either ends the other."""

    prefixes: int = 0
    """Prefixes that any server of a pair fetches from any other, at random times."""

    dp: int = 1
    """Data-parallel replicas of each server."""

    lockstep: bool = False
    """They share an exchange."""

    policy: Policy | None = None
    """None takes each of them in turn, by seed. The requests are the same whatever it is."""

    opened: float = 0.0
    """Probability that pieces of an open prompt come before a request: its beginnings, some of them cut short."""

    promise: PromiseLevel = "off"
    """Share of bounds of the time to first token that are to be kept. Forecasts come after random delays, and some
    fail."""

    small: bool = False
    """A quarter of all lengths: of prompts and texts, of a plan, and of the pool."""

    skipped: tuple[int, ...] = ()
    """Numbers of the actions from outside that are left out, as in SimulationReport.actions: by this a schedule that
    breaks a guarantee is shortened."""

    @property
    def scale(self) -> int:
        """What lengths are divided by."""
        return 4 if self.small else 1


def draw_config(scenario: Scenario, rng: random.Random, other: SchedulerConfig | None = None) -> SchedulerConfig:
    """Draw the configuration of a server. other: of the server that it exchanges KV with."""
    scale, seed = scenario.scale, scenario.seed
    config = SchedulerConfig(
        page_size=rng.choice([1, 2, 4, 8] if scale == 1 else [1, 2, 2, 4]),
        max_model_len=64 // scale,
        vocab_size=VOCABULARY,
        stages=rng.choice([1, 1, 2, 3]),
        pipeline_depth=rng.choice([0, 1, 2]),
        chunk_tokens=rng.choice([4, 8, 16, 64] if scale == 1 else [2, 3, 5, 16]),
        max_running=rng.choice([2, 4, 16]),
        metadata_rows=rng.choice([1, 3, 16]),
        max_queued_tokens=rng.choice([100 // scale, 100_000]),
        prefix_cache=rng.random() < 0.8,
        bootstrap_timeout_s=1.0,
        transfer_timeout_s=0.5,
        stage_timeout_s=60.0,
        hold_lease_s=0.1,
        hold_limit_s=0.4,
        hold_percent=rng.choice([30, 100]),
        optimistic_start=rng.random() < 0.5,
        eviction=("lru", "turns")[seed % 2],
    )
    config = msgspec.structs.replace(
        config,
        pipeline_depth=config.pipeline_depth if scenario.depth is None else scenario.depth,
        policy=scenario.policy or POLICIES[seed % len(POLICIES)],
        refuse_unreachable=seed % 5 == 4,
        max_queued_s=0.2 if seed % 11 == 3 else 0.0,
        max_predicted_ttft_s=0.1 if seed % 13 == 6 else 0.0,
        policy_reserve=(0.0, 0.1, 0.5, 1.0)[seed // len(POLICIES) % 4],
        tenant_lag_s=(0.0, 0.01, 5.0)[seed % 3],
        retain_percent=(10, 50, 100, 0)[seed % 4],
        library_salts=("", "tenant") if scenario.library else (),
        dp=scenario.dp,
        lockstep=scenario.lockstep,
        promise=scenario.promise,
    )
    tokens = rng.choice([48, 96, 256]) // scale  # below max_model_len some requests fill the whole pool
    if scenario.small and scenario.tiers:  # pages have to leave the pool before they come again
        tokens = rng.choice([16, 20, 28])
    config = msgspec.structs.replace(config, kv_pages=tokens // config.page_size)
    if scenario.rooms:
        config = msgspec.structs.replace(config, hold_limit_s=100.0)
    if other is not None and rng.random() < 0.5:
        config = msgspec.structs.replace(config, page_size=other.page_size, kv_pages=other.kv_pages)
    return config
