"""The decision where a prompt is computed: monotone in all that it goes by, and spread over requests."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.requests.remote_prefill import (
    CACHED_SHARE,
    PREFILL_REASONS,
    PROBE_COST_S,
    PROBE_S,
    SPREAD,
    LocalForecast,
    PrefillDecision,
    RemoteForecast,
    decide,
    threshold_of,
)

SECONDS = st.floats(0, 1e6)
SHARE = st.floats(0, 1)
HERE = st.builds(LocalForecast, ttft_s=SECONDS, work_s=SECONDS, delayed=st.integers(0, 500), cached_share=SHARE)
THERE = st.builds(RemoteForecast, queued_s=SECONDS, work_s=SECONDS, handoff_s=SECONDS, delayed=st.integers(0, 500))
THRESHOLD = st.floats(1 - SPREAD, 1 + SPREAD)


@given(HERE, THERE, THRESHOLD, st.sampled_from(("queued_s", "work_s", "handoff_s", "delayed")), SECONDS)
def test_what_costs_more_there_brings_no_prompt_there(
    here: LocalForecast, there: RemoteForecast, threshold: float, field: str, more: float
) -> None:
    dearer = replace(there, **{field: getattr(there, field) + more})
    if not decide(here, there, threshold).remote:
        assert not decide(here, dearer, threshold).remote


@given(HERE, THERE, THRESHOLD, st.sampled_from(("ttft_s", "work_s", "delayed")), SECONDS)
def test_what_costs_more_here_keeps_no_prompt_here(
    here: LocalForecast, there: RemoteForecast, threshold: float, field: str, more: float
) -> None:
    dearer = replace(here, **{field: getattr(here, field) + more})
    if decide(here, there, threshold).remote:
        assert decide(dearer, there, threshold).remote


@given(THERE, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 100))
def test_more_cached_tokens_here_send_no_prompt_away(
    there: RemoteForecast, tokens: int, cached: int, more: int, delayed: int
) -> None:
    def here(found: int) -> LocalForecast:
        left = tokens - min(found, tokens)
        return LocalForecast(0.01 + 1e-4 * left, 1e-4 * left, delayed, 1 - left / tokens)

    if not decide(here(cached), there).remote:
        assert not decide(here(cached + more), there).remote


@given(HERE, THERE, THRESHOLD)
def test_the_reason_says_what_was_found(here: LocalForecast, there: RemoteForecast, threshold: float) -> None:
    found = decide(here, there, threshold)
    assert found.reason in PREFILL_REASONS
    assert found.remote == (found.reason == "cheaper_there") == (there.cost_s <= threshold * here.cost_s)
    assert (found.reason == "cached_here") == (not found.remote and here.cached_share >= CACHED_SHARE)


@given(HERE, THERE)
def test_without_two_predictions_it_is_computed_there(here: LocalForecast, there: RemoteForecast) -> None:
    unknown = PrefillDecision(True, "unknown_cost")
    assert decide(None, there) == decide(here, None) == decide(None, None) == unknown


def test_requests_that_decode_here_weigh() -> None:
    """Computing 0.1 s here keeps each of 20 requests waiting for 0.1 s: a second of queue there is less."""
    there = RemoteForecast(queued_s=1.0, work_s=0.1, handoff_s=0.01)
    assert decide(LocalForecast(0.1, 0.1, 0, 0.0), there).reason == "cheaper_here"
    assert decide(LocalForecast(0.1, 0.1, 20, 0.0), there).reason == "cheaper_there"
    assert decide(LocalForecast(0.001, 0.001, 20, 0.99), there).reason == "cached_here"


@given(HERE, THERE, st.floats(0, 1e6))
def test_a_server_that_got_no_prompt_for_long_gets_one_that_loses_little(
    here: LocalForecast, there: RemoteForecast, unused_s: float
) -> None:
    found, plain = decide(here, there, unused_s=unused_s), decide(here, there)
    if found != plain:
        assert (found.reason, plain.remote) == ("probe", False)
        assert unused_s >= PROBE_S
        assert there.cost_s <= here.cost_s + PROBE_COST_S


def test_thresholds_are_spread_evenly_so_that_a_share_of_prompts_stays() -> None:
    """Servers that read one stale report do not all decide alike: as its queue grows, more and more prompts stay."""
    found = sorted(threshold_of(f"request-{number}") for number in range(2000))
    assert 1 - SPREAD <= found[0] < found[-1] <= 1 + SPREAD
    here = LocalForecast(1.0, 0.0, 0, 0.0)
    for quarter in (0.25, 0.5, 0.75):
        there = RemoteForecast(1 - SPREAD + 2 * SPREAD * quarter, 0.0)
        kept = sum(not decide(here, there, threshold).remote for threshold in found) / len(found)
        assert abs(kept - quarter) < 0.05
    assert threshold_of("a") == threshold_of("a")
