"""Bodies of SGLang's routers, taken apart; and whose messages are listened to."""

import asyncio

import msgspec
import pytest

from headrace.core.types.errors import HeadraceError
from headrace.gateway.sglang.bodies import MOST_REFUSED, held_at, rooms_of, take_apart, without_params
from headrace.gateway.sglang.decode_hosts import DecodeHosts
from headrace.gateway.sglang_nixl.wire import MAX_ROOM
from headrace.peer.commands import TicketRef
from headrace.server.api.request.parse import decode_object

ROUTER = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 8998, "bootstrap_room": 7}
PARAMS = {
    "remote_num_tokens": 40,
    "tickets": ["t"],
    "prompt_hashes": ["h"],
    "fingerprint": "fp",
    "lease_s": 30.0,
    "remote_host": "0.0.0.0",
}


def test_a_prefill_server_gets_the_clients_fields_and_is_asked_to_hold_the_kv():
    body = {"text": "x", "sampling_params": {"temperature": 0.5, "n": 1}, "stream": True, "rid": "r", **ROUTER}
    found = take_apart(body)
    assert found.room == 7
    assert msgspec.json.decode(found.posted("ticket")) == {
        "text": "x",
        "sampling_params": {"temperature": 0.5, "n": 1},
        "rid": "r",
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "ticket"},
    }
    assert take_apart({"input_ids": [1, 2], **ROUTER, "bootstrap_room": [9]}).room == 9


def test_a_warm_up_is_passed_on_as_it_is():
    body = {"text": "x", "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    found = take_apart({**body, "stream": False})
    assert (found.room, found.fields) == (None, body)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"bootstrap_room": None}, "bootstrap_room", "is missing"),
        ({"bootstrap_room": 0}, "bootstrap_room", "from 1 to"),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room", "from 1 to"),
        ({"bootstrap_room": True}, "bootstrap_room", "from 1 to"),
        ({"bootstrap_room": "7"}, "bootstrap_room", "from 1 to"),
        ({"bootstrap_room": [7, 8]}, "bootstrap_room", "names 2 rooms"),
        ({"n": 2}, "n", "n is 2"),
        ({"sampling_params": {"n": 3}}, "n", "n is 3"),
        ({"prompt": ["a", "b"]}, "prompt", "list of prompts"),
        ({"input_ids": [[1], [2]]}, "input_ids", "list of prompts"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "vLLM's"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(changes, field, words):
    with pytest.raises(HeadraceError, match=words) as raised:
        take_apart({"prompt": "x", **ROUTER, **changes})
    assert (raised.value.info.status, raised.value.info.field) == (400, field)


def test_bodies_that_are_no_objects():
    with pytest.raises(HeadraceError, match="JSON object"):
        asyncio.run(decode_object(b"[1]"))


def test_what_a_prefill_server_holds():
    content = msgspec.json.encode({"choices": [], "kv_transfer_params": PARAMS})
    held = held_at(content, "10.0.0.7", 8100)
    assert held.ticket == TicketRef(name="t", host="10.0.0.7", port=8100, wait=False, fingerprint="fp")
    assert (held.tokens, held.prompt_hash) == (40, "h")
    assert without_params(content) == b'{"choices":[]}'


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"kv_transfer_params": {**PARAMS, "tickets": ["a", "b"]}}, {"kv_transfer_params": {"tickets": []}}],
)
def test_answers_without_the_kv_of_one_prompt(answer):
    with pytest.raises(HeadraceError, match="without the KV of one prompt") as raised:
        held_at(msgspec.json.encode(answer), "h", 1)
    assert raised.value.info.status == 502


def test_addresses_of_decode_engines():
    urls = ["http://10.1.2.3:8000", "http://[fd00::5]:8000", "http://10.1.2.3:8001"]
    hosts = DecodeHosts(urls)
    assert hosts.urls_at("10.1.2.3") == (urls[0], urls[2])
    assert hosts.urls_at("fd00::5") == (urls[1],)
    assert hosts.urls_at("10.1.2.4") == ()
    assert hosts.urls_at("127.0.0.1") == ()
    here = DecodeHosts(["http://localhost:8000", *urls])
    assert here.urls_at("127.0.0.1") == ("http://localhost:8000",)
    assert here.urls_at("127.0.0.2") == ("http://localhost:8000",), "another address of this machine"
    assert here.urls_at("10.1.2.3") == (urls[0], urls[2])


NAMES = ("org/tested", "s3://bucket/tested")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("org/tested", None),
        ("anything else", None),
        ("", None),
        ("org/tested:adapter", "adapter"),
        ("other:adapter", "adapter"),
        ("other: adapter ", "adapter"),
        ("other:", None),
        ("s3://bucket/tested", None),
        ("s3://bucket/tested:adapter", "adapter"),
    ],
)
def test_a_model_is_what_sglang_takes_it_for(name, asked):
    found = take_apart({"prompt": "x", "model": name, **ROUTER}, NAMES)
    assert msgspec.json.decode(found.posted("t")).get("model") == asked
    warm_up = {"text": "x", "model": name, "bootstrap_host": "2.2.2.2"}
    assert take_apart(warm_up, NAMES).fields.get("model") == asked


def test_a_model_that_is_no_name_is_the_prefill_servers_to_refuse():
    assert take_apart({"prompt": "x", "model": 5, **ROUTER}).fields["model"] == 5


@pytest.mark.parametrize(
    ("body", "rooms"),
    [
        ({"n": 2}, [7, 8]),
        ({"sampling_params": {"n": 3}}, [7, 8, 9]),
        ({"prompt": ["a", "b"]}, [7, 8]),
        ({"prompt": ["a", "b"], "n": 2}, [7, 8, 9, 10]),
        ({"input_ids": [[1], [2]], "bootstrap_room": [7, 9]}, [7, 9]),
        ({"input_ids": [1, 2]}, [7]),
        ({"kv_transfer_params": {}}, [7]),
        ({"bootstrap_room": 0}, []),
        ({"bootstrap_room": "7"}, []),
        ({"bootstrap_room": [7, None, True, -1, 1 << 63, 8]}, [7, 8]),
        ({"bootstrap_room": MAX_ROOM, "n": 2}, [MAX_ROOM]),
        ({"n": 10**30}, [7]),
        ({"n": "2"}, [7]),
        ({"n": -1}, [7]),
    ],
)
def test_rooms_of_a_body_that_is_refused(body, rooms):
    assert rooms_of({"prompt": "x", **ROUTER, **body}) == rooms
    assert len(rooms_of({"prompt": ["x"] * 200, "n": 200, **ROUTER})) == MOST_REFUSED
    assert rooms_of({"prompt": "x"}) == []
