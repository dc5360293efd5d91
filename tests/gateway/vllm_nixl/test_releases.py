"""Releases of vLLM before one gateway: versions of their connector, and which hash each is answered with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.vllm_nixl.asked_hash import MOST_ADDRESSES, AskedHash
from headrace.gateway.vllm_nixl.releases import connector_version


@pytest.mark.parametrize(
    ("version", "connector"),
    [
        ("0.30.0", 11),
        ("0.31.0", 13),
        ("0.31.1", 13),
        ("0.32.0", 14),
        ("0.32.1rc1.dev3+cpu", 14),
        ("0.33.0", 15),
        ("1.0", 15),
        ("0.9", 11),
        ("", 11),
    ],
)
def test_the_nearest_release_tells_the_connector(version: str, connector: int) -> None:
    assert connector_version(version) == connector


def test_an_address_with_one_release_gets_its_hash() -> None:
    asked = AskedHash("a")
    assert asked.of("10.0.0.1") == "a"
    asked.serve([(("10.0.0.1", "::1"), "a", "x"), (("10.0.0.2",), "b", "y"), (("10.0.0.2",), "b", "z")])
    for _ in range(3):
        assert [asked.of(address) for address in ("10.0.0.1", "::1", "10.0.0.2")] == ["a", "a", "b"]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.booleans(), st.integers(0, 5))
def test_an_engine_of_any_release_gets_its_hash_within_as_many_queries(
    hashes: list[str], known: bool, heard: int
) -> None:
    asked = AskedHash("z")
    asked.serve([(("10.0.0.1",), each, str(number)) for number, each in enumerate(hashes)])
    if heard < len(hashes):
        asked.heard(str(heard))
    address = "10.0.0.1" if known else "10.9.9.9"
    assert {asked.of(address) for _ in set(hashes)} == set(hashes)


def test_engines_that_are_all_gone_leave_what_was_known() -> None:
    asked = AskedHash("a")
    asked.serve([(("10.0.0.1",), "b", "x")])
    asked.serve([])
    assert asked.of("10.0.0.1") == "b"


def test_turns_of_many_addresses_are_not_kept_for_ever() -> None:
    asked = AskedHash("a")
    asked.serve([((), "a", "x"), ((), "b", "y")])
    for number in range(3 * MOST_ADDRESSES):
        asked.of(str(number))
    assert len(asked._turns) <= MOST_ADDRESSES


def test_the_engine_that_was_heard_of_last_is_answered_first_when_all_ask_again() -> None:
    asked = AskedHash("a")
    asked.serve([(("::1",), each, f"agent {each}") for each in "abc"])
    assert [asked.of("::1") for _ in range(4)] == ["a", "b", "c", "a"]
    asked.heard("agent c")
    asked.heard("an agent that is not known")
    asked.begin_turns()
    assert [asked.of("::1") for _ in range(3)] == ["c", "a", "b"]
