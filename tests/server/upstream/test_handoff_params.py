"""From the fields that routers send to tickets and origins."""

from typing import Any

import msgspec
import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.body import parse_body
from headrace.server.upstream.handoff_params import (
    Address,
    HandoffParams,
    HandOver,
    Jobs,
    KvSource,
    hand_overs,
    numbered,
    origins,
    prompt_ids,
)

ONE, TWO = Jobs(1, 1), Jobs(2, 1)
NIXL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None}  # fmt: skip
FETCH = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 9, "ticket": "t", "remote_engine_id": "e"}
MOONCAKE = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://p:8998"}
ROOM = {"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 7}


def names(**fields: Any) -> HandoffParams:
    return parse_body(msgspec.json.encode(fields), HandoffParams)


def tickets(given: list[HandOver] | None) -> list[str | None]:
    return [over.ticket for over in given or ()]


def test_no_names() -> None:
    for given in (names(), names(kv_transfer_params=None), names(kv_transfer_params={"do_remote_decode": False})):
        assert hand_overs(given, ONE, "minted") is None
        assert origins(given, ONE, 8998) is None


def test_a_prefill_server_mints_a_ticket_and_holds() -> None:
    given = names(kv_transfer_params=NIXL)
    assert hand_overs(given, ONE, "minted") == [HandOver("minted", hold=True)]
    assert tickets(hand_overs(given, Jobs(2, 2), "m")) == ["m/0", "m/1", "m/2", "m/3"]


def test_a_transfer_id_is_the_ticket_at_both_sides() -> None:
    prefill = names(kv_transfer_params={**NIXL, "transfer_id": "xfer-1"})
    decode = names(kv_transfer_params={**MOONCAKE, "transfer_id": "xfer-1"})
    for jobs in (ONE, TWO):
        found = origins(decode, jobs, 8998)
        assert found is not None
        assert tickets(hand_overs(prefill, jobs, "minted")) == [origin.ticket for origin in found]
        assert {(origin.address, origin.wait, origin.held) for origin in found} == {
            (Address("http", "p", 8998), True, True)
        }


@pytest.mark.parametrize("address", ["http://p:8998", "p:8998", "http://p", "https://p:8998/"])
def test_bootstrap_addresses(address: str) -> None:
    found = origins(names(kv_transfer_params={**MOONCAKE, "remote_bootstrap_addr": address}), ONE, 1)
    assert found is not None
    assert found[0].address == Address("http", "p", 8998)


def test_what_a_prefill_server_answers_names_an_origin() -> None:
    assert origins(names(kv_transfer_params=FETCH), ONE, 1) == [
        KvSource(Address("control_server", "p", 9, "e"), "t", wait=False, held=True)
    ]
    several = names(kv_transfer_params={**FETCH, "tickets": ["t/0", "t/1"]})
    assert [origin.ticket for origin in origins(several, TWO, 1) or ()] == ["t/0", "t/1"]
    foreign = names(kv_transfer_params={**FETCH, "ticket": None, "remote_request_id": "r"})
    assert [origin.ticket for origin in origins(foreign, ONE, 1) or ()] == ["r"]


@pytest.mark.parametrize(
    ("jobs", "rooms", "expected"),
    [
        (ONE, 7, ["room:7"]),
        (ONE, [7], ["room:7"]),
        (ONE, (1 << 63) - 1, ["room:9223372036854775807"]),
        (TWO, 7, ["room:7/0", "room:7/1"]),
        (TWO, [7, 8], ["room:7", "room:8"]),
        (Jobs(1, 2), [7, 8], ["room:7", "room:8"]),
        (Jobs(1, 2), 7, ["room:7/0", "room:7/1"]),
        (Jobs(2, 2), [7, 8], ["room:7/0", "room:7/1", "room:8/0", "room:8/1"]),
        (Jobs(2, 2), [1, 2, 3, 4], ["room:1", "room:2", "room:3", "room:4"]),
    ],
)
def test_rooms_mean_the_same_at_both_sides(jobs: Jobs, rooms: int | list[int], expected: list[str]) -> None:
    given = names(bootstrap_host="p", bootstrap_port=1, bootstrap_room=rooms)
    assert hand_overs(given, jobs, "minted") == [HandOver(ticket) for ticket in expected]
    assert origins(given, jobs, 1) == [KvSource(Address("http", "p", 1), ticket) for ticket in expected]


def test_hosts_and_ports_for_each_prompt() -> None:
    given = names(bootstrap_host=["p", "2.2.2.2"], bootstrap_port=[None, 5], bootstrap_room=[1, 2])
    assert hand_overs(given, TWO, "m") == [HandOver("room:1"), HandOver(None)]
    assert origins(given, TWO, 8998) == [KvSource(Address("http", "p", 8998), "room:1"), KvSource(None, "room:2")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bootstrap_host": "p"}, "bootstrap_room"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({**ROOM, "bootstrap_room": [1, -1]}, "bootstrap_room[1]"),
        ({**ROOM, "bootstrap_room": [1, 2, 3]}, "bootstrap_room"),
        ({**ROOM, "bootstrap_host": ["p"]}, "bootstrap_host"),
        ({**ROOM, "kv_transfer_params": NIXL}, "bootstrap_room"),
        ({"kv_transfer_params": FETCH}, "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": {**NIXL, "transfer_id": ""}}, "kv_transfer_params.transfer_id"),
    ],
)
def test_what_a_prefill_server_cannot_use_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        hand_overs(names(**fields), TWO, "minted")
    assert (refused.value.info.status, refused.value.info.field) == (400, field)
    assert field in refused.value.info.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bootstrap_host": "p"}, "bootstrap_room"),
        ({"bootstrap_room": 1}, "bootstrap_host"),
        ({**ROOM, "bootstrap_port": 65536}, "bootstrap_port"),
        ({**ROOM, "bootstrap_port": [1, 2, 3]}, "bootstrap_port"),
        ({**ROOM, "kv_transfer_params": FETCH}, "bootstrap_room"),
        ({"kv_transfer_params": NIXL}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.remote_host"),
        ({"kv_transfer_params": {**FETCH, "remote_host": ""}}, "kv_transfer_params.remote_host"),
        ({"kv_transfer_params": {**FETCH, "remote_port": None}}, "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": {**FETCH, "remote_port": 0}}, "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": FETCH}, "kv_transfer_params.tickets"),
        ({"kv_transfer_params": {**FETCH, "tickets": ["t"]}}, "kv_transfer_params.tickets"),
        ({"kv_transfer_params": {**FETCH, "tickets": ["t", ""]}}, "kv_transfer_params.tickets[1]"),
        ({"kv_transfer_params": {**FETCH, "ticket": None}}, "kv_transfer_params.ticket"),
        *[
            (
                {"kv_transfer_params": {**MOONCAKE, "remote_bootstrap_addr": wrong}},
                "kv_transfer_params.remote_bootstrap_addr",
            )
            for wrong in ("", "http://", "http://p:x", "http://p:99999", "http://[p")
        ],
    ],
)
def test_what_a_decode_server_cannot_use_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        origins(names(**fields), TWO, 8998)
    assert (refused.value.info.status, refused.value.info.field) == (400, field)
    assert field in refused.value.info.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bootstrap_room": "7"}, "bootstrap_room"),
        ({"bootstrap_room": [1, "2"]}, "bootstrap_room[1]"),
        ({"bootstrap_host": 7}, "bootstrap_host"),
        ({"bootstrap_port": 1.5}, "bootstrap_port"),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": {"transfer_id": 7}}, "kv_transfer_params.transfer_id"),
    ],
)
def test_another_type_is_refused_by_the_fields_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        names(**fields)
    assert (refused.value.info.status, refused.value.info.field, refused.value.info.code) == (
        400,
        field,
        "invalid_type",
    )


def test_numbers_are_added_where_there_are_several() -> None:
    assert numbered("a", 1) == ["a"]
    assert numbered("a", 3) == ["a/0", "a/1", "a/2"]


def test_token_ids_that_come_with_the_origin() -> None:
    def given(ids: Any) -> HandoffParams:
        return names(kv_transfer_params={**FETCH, "prompt_token_ids": ids})

    assert prompt_ids(given([1, 2]), 1) == [[1, 2]]
    assert prompt_ids(given([[1, 2], [3]]), 2) == [[1, 2], [3]]
    for ids, prompts in ((None, 1), ([], 1), ([[1], [2]], 1), ([1, 2], 2), ([[1], 2], 2)):
        assert prompt_ids(given(ids), prompts) is None
    assert prompt_ids(names(kv_transfer_params={"prompt_token_ids": [1]}), 1) is None
