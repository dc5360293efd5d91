"""docs/protocol.md from the peer's side, against any prefill server (see conftest.py)."""

import base64
import struct
import time
from typing import Any

import pytest
import xxhash

from tests.conformance.client import Client, answer, send

MISMATCHES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"protocols": [7]}, "protocol", ["1", "7"]),
    ({"fingerprint": "another"}, "fingerprint", ["another"]),
    ({"metadata_version": 9}, "metadata_version", ["1", "9"]),
    ({"metadata_bytes": 128}, "metadata_bytes", ["256", "128"]),
    ({"checksums": ["crc32"]}, "checksum", ["xxh3_64", "crc32"]),
    ({"backends": ["pigeon"]}, "backend", ["zmq", "pigeon"]),
    ({"components": [{"name": "x", "dtype": "int3", "shape": [1, 2, 3, 4]}]}, "components", ["x int3 [1, 2, 3, 4]"]),
]
GEOMETRIES = [
    ("dtype", "float8"),
    ("layers", 77),
    ("kv_heads", 77),
    ("head_dim", 77),
    ("layer_start", 77),
    ("page_size", 0),
]


@pytest.mark.parametrize(("changes", "field", "words"), MISMATCHES)
def test_a_mismatch_is_refused_naming_both_values(
    client: Client, changes: dict[str, Any], field: str, words: list[str]
) -> None:
    refused = client.hello(**changes)
    assert (refused["type"], refused["code"]) == ("Refuse", f"{field}_mismatch")
    assert all(word in refused["message"] for word in words)
    assert client.hello()["type"] == "Welcome"


@pytest.mark.parametrize(("field", "theirs"), GEOMETRIES)
def test_a_geometry_that_does_not_fit_is_refused_naming_both_values(client: Client, field: str, theirs: Any) -> None:
    refused = client.hello(geometries=[client.target.geometry | {field: theirs}])
    assert (refused["type"], refused["code"]) == ("Refuse", f"{field}_mismatch")
    assert str(theirs) in refused["message"]


def test_a_repeated_hello_gets_the_same_welcome_and_another_one_a_new_session(client: Client) -> None:
    first = client.hello(instance="c" * 32)
    assert client.hello(instance="c" * 32) == first
    assert client.hello(instance="c" * 32, kv_pages=65)["session"] != first["session"]


def test_without_a_session_everything_but_hello_is_refused(client: Client) -> None:
    assert client.ask({"type": "Ping", "number": 1})["code"] == "no_session"
    client.hello()
    client.say({"type": "Goodbye"})
    assert client.ask({"type": "Ping", "number": 1})["code"] == "no_session"


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x80"], [b"x" * 300], [b"a", b"b"], [b"\x81\xa4type\xa4What"]])
def test_what_is_no_message_is_refused_and_the_session_stands(client: Client, frames: list[bytes]) -> None:
    client.hello()
    client.control_server.send_multipart(frames)
    assert client.heard()["code"] == "bad_message"
    assert client.silent()
    client.control_server.send(bytes((5 << 20) + 1))
    assert client.heard()["code"] == "bad_message"
    assert client.silent()


def test_unknown_keys_are_skipped(client: Client) -> None:
    assert client.hello(colour="red")["type"] == "Welcome"
    assert client.ask({"type": "Ping", "number": 3, "colour": "red"}) == {"type": "Pong", "number": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": b""},
        {"pages": b"\1\0\0\0" * 3},
        {"pages": b"\xff\xff\xff\xff\1\0\0\0\2\0\0\0"},
        {"pages": b"\1\0\0\0\2\0\0\0\x40\0\0\0"},
        {"pages": b"\1\0\0\0\2\0\0\0\3\0\0"},
        {"row": 4},
        {"cached_tokens": 40},
        {"prompt_tokens": 1025},
    ],
)
def test_a_reservation_that_does_not_fit_the_hello_fails_alone(client: Client, changes: dict[str, Any]) -> None:
    client.hello()
    client.reserve("bad", **changes)
    failed = client.heard()
    assert (failed["type"], failed["ticket"], failed["code"]) == ("Failed", "bad", "bad_reservation")
    assert client.silent()


def test_a_reservation_has_a_slot_where_requests_have_states(client: Client) -> None:
    client.hello()
    client.reserve("bad", slot=-1 if client.target.has_states else 0)
    failed = client.heard()
    assert (failed["type"], failed["ticket"], failed["code"]) == ("Failed", "bad", "bad_reservation")
    assert "slot" in failed["message"]
    assert client.silent()


def test_a_ticket_in_use_and_a_stale_generation(client: Client) -> None:
    client.hello()
    client.reserve("used", 5)
    client.reserve("used", 5)
    client.reserve("used", 4)
    assert client.silent()
    client.reserve("used", 6)
    failed = client.heard()
    assert (failed["generation"], failed["code"]) == (6, "ticket_in_use")
    cancelled = {"type": "Cancelled", "ticket": "used", "generation": 5}
    for _ in range(2):  # once it is open, once it has ended
        assert client.ask({"type": "Cancel", "ticket": "used", "generation": 5}) == cancelled
    client.reserve("used", 5)
    assert client.silent()


def test_cancelling_what_was_never_reserved_is_answered(client: Client) -> None:
    client.hello()
    cancelled = client.ask({"type": "Cancel", "ticket": "never", "generation": 9})
    assert cancelled == {"type": "Cancelled", "ticket": "never", "generation": 9}


def test_tickets_beyond_the_quota_fail(client: Client) -> None:
    most = client.hello(kv_pages=1 << 20)["max_tickets"]
    for number in range(most + 1):
        client.reserve(f"q{number}")
    failed = client.heard()
    assert (failed["ticket"], failed["code"], failed["status"]) == (f"q{most}", "too_many_tickets", 429)


@pytest.mark.parametrize("first", ["reserve", "prompt"])
def test_a_ticket_is_delivered_whichever_comes_first(client: Client, first: str) -> None:
    client.hello()
    data = client.attached()
    ticket = f"first-{first}"
    if first == "reserve":
        client.reserve(ticket, tokens=200)
        assert client.silent()
        prefill = client.prefill(ticket, 200)
    else:
        prefill = client.prefill(ticket, 200)
        client.reserve(ticket, tokens=200)
    position = 0
    while position < 200:
        chunk, frames = client.take(data)
        assert (chunk["type"], chunk["ticket"], chunk["start"], chunk["row"]) == ("Chunk", ticket, position, 1)
        assert chunk["checksum"] == xxhash.xxh3_64_intdigest(b"".join(frames))
        payload = frames[1:] if chunk.get("total") else frames
        expected = client.target.payload_bytes(chunk["count"], 200 if chunk.get("total") else 0)
        assert chunk["payload_bytes"] == sum(map(len, payload)) == expected
        assert chunk.get("total", 0) == (chunk["chunk"] + 1 if len(frames[0]) == 256 else 0)
        answer(data, chunk)
        position += chunk["count"]
    assert client.heard() == {"type": "Finished", "ticket": ticket, "generation": 1}
    assert prefill.answer().status_code == 200


def test_unanswered_chunks_come_again_on_a_new_connection(client: Client) -> None:
    client.hello()
    first = client.attached()
    client.reserve("again")
    prefill = client.prefill("again")
    chunk = client.take(first)
    second = client.attached()
    assert client.take(second) == chunk
    answer(first, chunk[0])
    assert client.take(first)[0]["code"] == "no_session"
    answer(second, chunk[0])
    assert client.heard()["type"] == "Finished"
    assert prefill.answer().status_code == 200


def test_a_nack_fails_the_ticket_at_both_ends_and_nothing_follows(client: Client) -> None:
    client.hello()
    data = client.attached()
    client.reserve("nack")
    prefill = client.prefill("nack")
    chunk, _ = client.take(data)
    answer(data, chunk, "Nack", code="checksum_mismatch", message="1 here, 2 there")
    failed = client.heard()
    assert (failed["type"], failed["ticket"], failed["code"]) == ("Failed", "nack", "checksum_mismatch")
    assert prefill.answer().status_code == failed["status"]
    send(data, {"type": "Ping", "number": 4})
    assert client.take(data) == ({"type": "Pong", "number": 4}, [])


def test_a_ticket_cancelled_with_bytes_unanswered_is_quiet(client: Client) -> None:
    client.hello()
    data = client.attached()
    client.reserve("quiet")
    prefill = client.prefill("quiet")
    chunk, _ = client.take(data)
    cancelled = client.ask({"type": "Cancel", "ticket": "quiet", "generation": 1})
    assert cancelled == {"type": "Cancelled", "ticket": "quiet", "generation": 1}
    assert prefill.answer().status_code >= 400
    answer(data, chunk)
    send(data, {"type": "Ping", "number": 5})
    assert client.take(data) == ({"type": "Pong", "number": 5}, [])


def test_data_connections_are_for_sessions_and_stages_that_exist(client: Client) -> None:
    client.hello()
    assert client.take(client.attach(session="0" * 32))[0]["code"] == "no_session"
    client.attached()  # the stage has heard of the session
    assert client.take(client.attach(stage=0, peer_stage=5))[0]["code"] == "wrong_stage"
    stranger = client.attach(session="0" * 32)
    client.take(stranger)
    send(stranger, {"type": "Ack", "ticket": "t", "generation": 1, "chunk": 0})
    assert client.take(stranger)[0]["code"] == "no_session"
    stranger.send(b"\xc1")
    assert client.take(stranger)[0]["code"] == "bad_message"


def test_a_silent_peer_loses_its_session_and_its_tickets(client: Client) -> None:
    timeout_s = client.hello()["timeout_s"]
    client.attached()
    client.reserve("silent")
    prefill = client.prefill("silent")
    time.sleep(timeout_s + 1)
    assert client.ask({"type": "Ping", "number": 1})["code"] == "no_session"
    assert prefill.answer().status_code >= 400


@pytest.mark.parametrize("first", ["reserve", "prompt"])
def test_draft_data_comes_in_a_frame_of_its_own_where_the_reserve_asks(client: Client, first: str) -> None:
    """Taken apart by hand. A prompt that is computed before the Reserve says itself what of it is kept."""
    client.hello()
    data = client.attached()
    ticket = f"draft-{first}"
    if first == "reserve":
        client.reserve(ticket, tokens=40, hidden=True, draft_top_k=3)
        assert client.silent()
        prefill = client.prefill(ticket, 40)
    else:
        prefill = client.prefill(ticket, 40, hidden_states="all", draft_top_k=3, handoff="hold")
        assert prefill.answer().status_code == 200
        client.reserve(ticket, tokens=40, hidden=True, draft_top_k=3)
    chunk, frames = client.take(data)
    assert chunk["total"] == 1
    assert chunk["checksum"] == xxhash.xxh3_64_intdigest(b"".join(frames))
    row, draft, *payload = frames
    assert (len(row), len(draft)) == (256, chunk["draft_bytes"])
    assert chunk["payload_bytes"] == sum(map(len, payload)) == client.target.payload_bytes(40, 40)
    version, dtype, count, name, generation, position, size = struct.unpack_from("<HBxHxxQQII", draft)
    assert (version, count, generation, position) == (1, 3, 1, 39)
    assert name == xxhash.xxh3_64_intdigest(ticket.encode())
    ids = struct.unpack_from("<3i", draft, 32)
    probs = struct.unpack_from("<3f", draft, 44)
    assert list(probs) == sorted(probs, reverse=True)
    assert 0 <= probs[2] <= probs[0] <= 1
    assert len(set(ids)) == 3
    assert len(draft) == 56 + size * {1: 4, 2: 2, 3: 2}[dtype]
    answer(data, chunk)
    assert client.heard()["type"] == "Finished"
    response = prefill.answer().json()
    if first == "prompt":
        assert response["draft"]["top_ids"] == list(ids)
        found = response["hidden_states"]
        assert (found["start"], found["shape"]) == (0, [40, size])
        assert found["dtype"] == {1: "float32", 2: "bfloat16", 3: "float16"}[dtype]
        assert base64.b64decode(found["data"])[-(len(draft) - 56) :] == draft[56:]
    else:
        assert (response["draft"], response["hidden_states"]) == (None, None)


def test_no_draft_frame_comes_unasked(client: Client) -> None:
    client.hello()
    data = client.attached()
    client.reserve("plain", tokens=40)
    prefill = client.prefill("plain", 40, hidden_states="last", draft_top_k=3)
    chunk, frames = client.take(data)
    assert "draft_bytes" not in chunk
    assert sum(map(len, frames)) == 256 + chunk["payload_bytes"]
    answer(data, chunk)
    assert client.heard()["type"] == "Finished"
    assert prefill.answer().json()["hidden_states"]["shape"][0] == 1
