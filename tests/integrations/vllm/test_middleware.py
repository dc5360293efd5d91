"""BootstrapNames: SGLang's bootstrap fields become kv_transfer_params; everything else passes unchanged."""

import asyncio
import json
from typing import Any

import pytest

from headrace.integrations.vllm.middleware import BadBootstrapFields, BootstrapNames, translate

NAMES = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8000, "bootstrap_room": 42}
PARAMS = {"do_remote_prefill": True, "transfer_id": "room:42", "remote_bootstrap_addr": "http://10.0.0.1:8000"}


def renamed(**fields: Any) -> Any:
    made = translate(json.dumps(fields).encode())
    return None if made is None else json.loads(made)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (NAMES, PARAMS),
        ({**NAMES, "bootstrap_port": None}, {**PARAMS, "remote_bootstrap_addr": "http://10.0.0.1:8998"}),
        ({**NAMES, "bootstrap_host": "fd00::1"}, {**PARAMS, "remote_bootstrap_addr": "http://[fd00::1]:8000"}),
        ({name: [value] for name, value in NAMES.items()}, PARAMS),
        ({**NAMES, "bootstrap_room": 0}, {**PARAMS, "transfer_id": "room:0"}),
    ],
)
def test_one_room_is_one_handoff(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert renamed(prompt="x", **fields) == {"prompt": "x", "kv_transfer_params": expected}


def test_sglangs_host_for_no_transfer_names_no_ticket() -> None:
    assert renamed(prompt="x", bootstrap_host="2.2.2.2", bootstrap_room=1) == {"prompt": "x"}


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "bootstrap_room"}', b'["bootstrap_room"]', b'{"a": 1}'])
def test_other_bodies_are_left_alone(body: bytes) -> None:
    assert translate(body) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": 1},
        {"bootstrap_host": "a"},
        {**NAMES, "bootstrap_room": "1"},
        {**NAMES, "bootstrap_room": True},
        {**NAMES, "bootstrap_room": [1, 2]},
        {**NAMES, "bootstrap_room": []},
        {**NAMES, "bootstrap_port": "80"},
        {**NAMES, "kv_transfer_params": PARAMS},
    ],
    ids=str,
)
def test_names_that_are_no_handoff_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadBootstrapFields):
        renamed(**fields)


class Exchange:
    """One request through the middleware to an application that notes what it receives."""

    def __init__(self, *parts: bytes, path: str = "/v1/completions", method: str = "POST", gone: bool = False) -> None:
        self.incoming: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": number + 1 < len(parts) or gone}
            for number, part in enumerate(parts)
        ]
        self.incoming += [{"type": "http.disconnect"}]
        headers = [(b"Content-Length", b"%d" % sum(map(len, parts))), (b"x-other", b"1")]
        self.scope = {"type": "http", "method": method, "path": path, "headers": headers}
        self.seen: list[dict[str, Any]] = []
        self.headers: dict[bytes, bytes] = {}
        self.sent: list[dict[str, Any]] = []
        asyncio.run(BootstrapNames(self.app)(self.scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        return self.incoming.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        while not self.seen or self.seen[-1]["type"] != "http.disconnect":
            self.seen.append(await receive())

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.seen)


def test_a_body_in_parts_is_renamed_and_its_length_is_right() -> None:
    whole = json.dumps({"prompt": "x", **NAMES}).encode()
    exchange = Exchange(whole[:5], whole[5:9], whole[9:])
    assert json.loads(exchange.body) == {"prompt": "x", "kv_transfer_params": PARAMS}
    assert int(exchange.headers[b"content-length"]) == len(exchange.body)
    assert exchange.headers[b"x-other"] == b"1"
    assert exchange.seen[-1]["type"] == "http.disconnect", "vLLM hears when the client leaves"


@pytest.mark.parametrize(
    "exchange",
    [{}, {"path": "/v1/models"}, {"method": "GET"}, {"gone": True}],
    ids=["no names", "another path", "another method", "the client leaves early"],
)
def test_what_is_not_renamed_arrives_as_it_was_sent(exchange: dict[str, Any]) -> None:
    names = NAMES if exchange else {}
    whole = json.dumps({"prompt": "x" * 100, **names}).encode()
    made = Exchange(whole[:50], whole[50:], **exchange)
    assert made.body == whole
    assert made.headers[b"content-length"] == b"%d" % len(whole)


def test_a_refusal_is_an_error_of_vllms_shape() -> None:
    exchange = Exchange(json.dumps({"bootstrap_room": 1}).encode())
    assert exchange.seen == []
    start, body = exchange.sent
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["param"] == "bootstrap_room"
