"""Handoff fields that routers send: tickets at a prefill server, KV sources at a decode server."""

from typing import Any

import msgspec
import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.parse import parse_body
from headrace.server.upstream.handoff_params import (
    BatchShape,
    HandoffParams,
    KvSink,
    KvSource,
    PrefillAddress,
    kv_sinks,
    kv_sources,
    numbered_tickets,
    prompt_ids,
)

ONE, TWO = BatchShape(1, 1), BatchShape(2, 1)
NIXL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None}  # fmt: skip
FETCH = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 9, "ticket": "t", "remote_engine_id": "e"}
MOONCAKE = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://p:8998"}
ROOM = {"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 7}


def params(**fields: Any) -> HandoffParams:
    return parse_body(msgspec.json.encode(fields), HandoffParams)


def tickets(given: list[KvSink] | None) -> list[str | None]:
    return [sink.ticket for sink in given or ()]


def test_a_body_without_handoff_fields() -> None:
    for given in (params(), params(kv_transfer_params=None), params(kv_transfer_params={"do_remote_decode": False})):
        assert kv_sinks(given, ONE, "made-up") is None
        assert kv_sources(given, ONE, 8998) is None


def test_a_prefill_server_makes_up_a_ticket_and_holds() -> None:
    given = params(kv_transfer_params=NIXL)
    assert kv_sinks(given, ONE, "made-up") == [KvSink("made-up", hold=True)]
    assert tickets(kv_sinks(given, BatchShape(2, 2), "m")) == ["m/0", "m/1", "m/2", "m/3"]


def test_a_transfer_id_is_the_ticket_at_both_sides() -> None:
    prefill = params(kv_transfer_params={**NIXL, "transfer_id": "xfer-1"})
    decode = params(kv_transfer_params={**MOONCAKE, "transfer_id": "xfer-1"})
    for batch in (ONE, TWO):
        found = kv_sources(decode, batch, 8998)
        assert found is not None
        assert tickets(kv_sinks(prefill, batch, "made-up")) == [source.ticket for source in found]
        assert {(source.address, source.wait, source.held) for source in found} == {
            (PrefillAddress("http", "p", 8998), True, True)
        }


@pytest.mark.parametrize("address", ["http://p:8998", "p:8998", "http://p", "https://p:8998/"])
def test_bootstrap_addresses(address: str) -> None:
    found = kv_sources(params(kv_transfer_params={**MOONCAKE, "remote_bootstrap_addr": address}), ONE, 1)
    assert found is not None
    assert found[0].address == PrefillAddress("http", "p", 8998)


def test_the_response_of_a_prefill_server_names_a_source() -> None:
    assert kv_sources(params(kv_transfer_params=FETCH), ONE, 1) == [
        KvSource(PrefillAddress("control", "p", 9, "e"), "t", wait=False, held=True)
    ]
    several = params(kv_transfer_params={**FETCH, "tickets": ["t/0", "t/1"]})
    assert [source.ticket for source in kv_sources(several, TWO, 1) or ()] == ["t/0", "t/1"]
    foreign = params(kv_transfer_params={**FETCH, "ticket": None, "remote_request_id": "r"})
    assert [source.ticket for source in kv_sources(foreign, ONE, 1) or ()] == ["r"]


@pytest.mark.parametrize(
    ("batch", "rooms", "expected"),
    [
        (ONE, 7, ["room:7"]),
        (ONE, [7], ["room:7"]),
        (ONE, (1 << 63) - 1, ["room:9223372036854775807"]),
        (TWO, 7, ["room:7/0", "room:7/1"]),
        (TWO, [7, 8], ["room:7", "room:8"]),
        (BatchShape(1, 2), [7, 8], ["room:7", "room:8"]),
        (BatchShape(1, 2), 7, ["room:7/0", "room:7/1"]),
        (BatchShape(2, 2), [7, 8], ["room:7/0", "room:7/1", "room:8/0", "room:8/1"]),
        (BatchShape(2, 2), [1, 2, 3, 4], ["room:1", "room:2", "room:3", "room:4"]),
    ],
)
def test_rooms_mean_the_same_at_both_sides(batch: BatchShape, rooms: int | list[int], expected: list[str]) -> None:
    given = params(bootstrap_host="p", bootstrap_port=1, bootstrap_room=rooms)
    assert kv_sinks(given, batch, "made-up") == [KvSink(ticket) for ticket in expected]
    assert kv_sources(given, batch, 1) == [KvSource(PrefillAddress("http", "p", 1), ticket) for ticket in expected]


def test_hosts_and_ports_for_each_prompt() -> None:
    given = params(bootstrap_host=["p", "2.2.2.2"], bootstrap_port=[None, 5], bootstrap_room=[1, 2])
    assert kv_sinks(given, TWO, "m") == [KvSink("room:1"), KvSink(None)]
    assert kv_sources(given, TWO, 8998) == [
        KvSource(PrefillAddress("http", "p", 8998), "room:1"),
        KvSource(None, "room:2"),
    ]


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
        kv_sinks(params(**fields), TWO, "made-up")
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
            for wrong in ("", "http://", "http://p:x", "http://p:99999", "http://[p", "http://" + "p" * 1000)
        ],
    ],
)
def test_what_a_decode_server_cannot_use_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        kv_sources(params(**fields), TWO, 8998)
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
        params(**fields)
    assert (refused.value.info.status, refused.value.info.field, refused.value.info.code) == (
        400,
        field,
        "invalid_type",
    )


def test_numbers_are_added_where_there_are_several() -> None:
    assert numbered_tickets("a", 1) == ["a"]
    assert numbered_tickets("a", 3) == ["a/0", "a/1", "a/2"]


def test_token_ids_that_come_with_the_source() -> None:
    def given(ids: Any) -> HandoffParams:
        return params(kv_transfer_params={**FETCH, "prompt_token_ids": ids})

    assert prompt_ids(given([1, 2]), 1) == [[1, 2]]
    assert prompt_ids(given([[1, 2], [3]]), 2) == [[1, 2], [3]]
    for ids, prompts in ((None, 1), ([], 1), ([[1], [2]], 1), ([1, 2], 2), ([[1], 2], 2)):
        assert prompt_ids(given(ids), prompts) is None
    assert prompt_ids(params(kv_transfer_params={"prompt_token_ids": [1]}), 1) is None
