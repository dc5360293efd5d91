"""Whether a prefix is fetched or computed, and from where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.routing.handoff_cost import HandoffCost
from headrace.server.routing.prefix_choice import (
    LONGEST_S,
    SHORTEST_S,
    HeldPrefix,
    choose_sibling,
    compute_s,
    worth_asking,
)

COST = (1e-8, 1e-3)
TOKENS = st.integers(0, 100_000)
TAKES = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 9))


def free(_server: str, _tokens: int) -> float:
    return 0.0


def test_the_sibling_that_saves_most_is_chosen() -> None:
    takes = {"near": 0.1, "far": 0.9}
    found = [HeldPrefix("near", 900), HeldPrefix("far", 1000), HeldPrefix("none", 0)]
    choice = choose_sibling(COST, 100, found, lambda server, _: takes[server])
    assert choice is not None
    assert choice.held == found[0]
    assert choice.deadline_s == pytest.approx(compute_s(COST, 100, 900))


def test_what_is_here_or_takes_longer_is_not_fetched() -> None:
    assert choose_sibling(COST, 1000, [HeldPrefix("a", 1000)], free) is None
    assert choose_sibling(COST, 0, [HeldPrefix("a", 1000)], lambda _server, _tokens: 1.0) is None
    assert choose_sibling(COST, 0, [HeldPrefix("a", 1000, load_s=1.0)], free) is None
    assert choose_sibling(COST, 0, [], free) is None


def test_what_a_sibling_has_in_tiers_comes_if_its_loading_is_worth_it() -> None:
    pool = HeldPrefix("a", 500)
    for load_s, chosen in ((0.1, 1000), (0.7, 500)):
        choice = choose_sibling(COST, 0, [pool, HeldPrefix("a", 1000, load_s)], free)
        assert choice is not None
        assert choice.held.tokens == chosen


def test_short_prompts_cost_no_question() -> None:
    assert not worth_asking(COST, 0, 10)
    assert not worth_asking(None, 64, 64)
    assert worth_asking(COST, 0, 100)
    assert worth_asking(None, 0, 64)


def test_a_server_that_cannot_predict_yet_fetches() -> None:
    choice = choose_sibling(None, 0, [HeldPrefix("a", 64)], free)
    assert choice is not None
    assert choice.deadline_s == LONGEST_S


def test_a_sibling_that_was_slow_is_left_alone_for_as_much() -> None:
    learnt = HandoffCost()
    learnt.observe(1000, 5.0)
    assert choose_sibling(COST, 0, [HeldPrefix("a", 1000)], lambda _server, tokens: learnt.seconds(tokens)) is None


@given(TOKENS, st.lists(st.builds(HeldPrefix, st.sampled_from("abcd"), TOKENS, st.floats(0, 9))), TAKES)
def test_no_choice_is_worse_than_computing_and_none_is_better(
    cached: int, found: list[HeldPrefix], takes: dict[str, float]
) -> None:
    """Against all that siblings have, one after the other."""

    def takes_s(server: str, _tokens: int) -> float:
        return takes.get(server, 0.0)

    def saved_s(held: HeldPrefix) -> float:
        return compute_s(COST, cached, held.tokens)

    choice = choose_sibling(COST, cached, found, takes_s)
    gains = {held: saved_s(held) - takes_s(held.server, 0) - held.load_s for held in found if held.tokens > cached}
    if choice is None:
        assert all(gain < 0.2 * saved_s(held) + 1e-9 for held, gain in gains.items())
    else:
        allowed = [gain for held, gain in gains.items() if gain >= 0.2 * saved_s(held)]
        assert gains[choice.held] == max(allowed) > 0
        assert SHORTEST_S <= choice.deadline_s <= LONGEST_S
