"""CURVE over real sockets: who gets in, who does not, and what both sides say of it."""

import logging
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import ConnectPrefill, PeerJoined, PrefillDown, PrefillUp
from headrace.core.messages.stage_events import KvReceived
from headrace.server.config.curve_keys import write_pair
from headrace.transfer.control.client import ControlClient
from headrace.transfer.control.server import ControlServer
from headrace.transfer.data.sender import Sender
from headrace.transfer.sockets.curve_keys import read_public
from tests.transfer.control.session_table import OFFER, hello
from tests.transfer.data.test_transfer import geometry
from tests.transfer.harness import Loop, Pair, value, zmq_context

TIMEOUT_S = 0.5


class Keys:
    """A prefill server's, those of a peer that it allows, and those of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed = folder / "allowed"
        self.secret = {name: str(write_pair(folder, name)[1]) for name in ("server", "peer", "stranger")}
        self.public = {name: read_public(Path(path)) for name, path in self.secret.items()}
        self.allowed.mkdir()
        self.allow("peer")

    def allow(self, name: str) -> None:
        (self.allowed / f"{name}.key").write_text((self.folder / f"{name}.key").read_text())

    @property
    def server(self) -> TransferConfig:
        config = TransferConfig(peer_timeout_s=TIMEOUT_S, window_bytes=1 << 20)
        return replace(config, curve_key=self.secret["server"], curve_allowed=str(self.allowed))

    def peer(self, name: str = "peer") -> TransferConfig:
        return replace(self.server, curve_key=self.secret[name] if name else "", curve_allowed="")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


class Knocking:
    """A control endpoint with keys, and a control client with those it is given."""

    def __init__(self, keys: Keys, contexts: tuple[Any, Any], name: str, server_key: str) -> None:
        self.control_server = ControlServer(keys.server, contexts[0])
        self.control_client = ControlClient(keys.peer(name), contexts[1])
        self.loop = Loop(self.control_server, self.control_client)
        self.control_server.ready(OFFER)
        self.control_client.ready(hello())
        endpoint = f"tcp://127.0.0.1:{self.control_server.port}"
        self.loop.apply(self.control_client, ConnectPrefill(name="p", endpoint=endpoint, server_key=server_key))

    def refused(self, reason: str) -> float:
        return value(self.control_server.statistics(), "handshakes_refused_total", ("control", reason))


@pytest.fixture
def contexts() -> Iterator[tuple[Any, Any]]:
    """Two processes in one."""
    with zmq_context() as one, zmq_context() as other:
        yield one, other


def test_a_peer_that_is_allowed_gets_a_session(keys: Keys, contexts: tuple[Any, Any]) -> None:
    both = Knocking(keys, contexts, "peer", keys.public["server"])
    up = both.loop.wait_for(both.control_client, PrefillUp)
    assert up.terms.server_key == keys.public["server"]
    assert both.loop.wait_for(both.control_server, PeerJoined).key == "peer"
    assert not any(sample.name == "handshakes_refused_total" for sample in both.control_server.statistics().samples)
    both.loop.close()


@pytest.mark.parametrize(
    ("name", "server_key", "reason", "said", "advice"),
    [
        ("stranger", "server", "not_allowed", "is not among those allowed", "--curve-allowed folder has ours"),
        ("peer", "stranger", "wrong_server_key", "correct its --curve-server-key", "--curve-server-key is its"),
        ("", "", "no_curve", "no CURVE handshake", "set --curve-server-key here"),
    ],
)
def test_a_peer_that_is_not_allowed_is_refused_and_both_sides_say_what_to_check(
    keys: Keys,
    contexts: tuple[Any, Any],
    caplog: pytest.LogCaptureFixture,
    name: str,
    server_key: str,
    reason: str,
    said: str,
    advice: str,
) -> None:
    both = Knocking(keys, contexts, name, keys.public.get(server_key, ""))
    both.loop.until(lambda: both.refused(reason) >= 2, timeout_s=10)
    both.loop.wait_for(both.control_client, PrefillDown)
    assert advice in both.loop.of(both.control_client, PrefillDown)[0].reason
    assert not both.loop.of(both.control_server, PeerJoined)
    assert both.loop.of(both.control_client, PrefillUp) == []
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1, "once, not for every attempt"
    assert said in lines[0]
    assert keys.public["stranger"] in lines[0] or name != "stranger"
    both.loop.close()


def test_after_a_while_a_refusal_is_logged_again(
    keys: Keys, contexts: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    both = Knocking(keys, contexts, "stranger", keys.public["server"])
    both.loop.until(lambda: both.refused("not_allowed") >= 2, timeout_s=10)
    later = Loop(both.control_client)
    while len(caplog.records) < 2:
        later.turn(0.02)
        both.control_server.receive(1e9)
    both.loop.close()


def test_a_key_that_is_put_into_the_folder_counts_from_the_next_attempt(keys: Keys, contexts: tuple[Any, Any]) -> None:
    both = Knocking(keys, contexts, "stranger", keys.public["server"])
    both.loop.until(lambda: both.refused("not_allowed"))
    keys.allow("stranger")
    assert both.loop.wait_for(both.control_client, PrefillUp, timeout_s=10)
    both.loop.close()


def test_a_connection_in_the_clear_is_no_substitute_for_one_with_keys(keys: Keys, contexts: tuple[Any, Any]) -> None:
    for name, server_key in (("peer", ""), ("", keys.public["server"])):
        control_client = ControlClient(keys.peer(name), contexts[1])
        control_client.ready(hello())
        (down,) = control_client.apply(
            ConnectPrefill(name="p", endpoint="tcp://127.0.0.1:9", server_key=server_key), 0.0
        )
        assert isinstance(down, PrefillDown)
        assert "--curve-server-key" in down.reason
        assert control_client.sockets() == []


def test_kv_crosses_an_encrypted_data_connection(keys: Keys, contexts: tuple[Any, Any]) -> None:
    pair = Pair(
        contexts[0],
        geometry(16),
        geometry(16),
        config=keys.server,
        receiver_context=contexts[1],
        receiver_config=keys.peer(),
        server_key=keys.public["server"],
    )
    pair.expect(1, range(8), 0, 128)
    for chunk in range(8):
        pair.send(1, chunk, chunk * 16, 16, pages=range(8, 16), dst_pages=range(8), last=chunk == 7)
    pair.loop.wait_for(pair.receiver, KvReceived)
    assert np.array_equal(pair.target.data[:8], pair.store.data[8:16])
    pair.close()


@pytest.mark.parametrize("name", ["stranger", ""])
def test_a_data_connection_needs_a_key_even_with_the_session_known(
    keys: Keys, contexts: tuple[Any, Any], name: str
) -> None:
    pair = Pair(
        contexts[0],
        geometry(16),
        geometry(16),
        config=keys.server,
        receiver_context=contexts[1],
        receiver_config=keys.peer(name),
        server_key=keys.public["server"] if name else "",
    )
    reason = "not_allowed" if name else "no_curve"
    refused = ("data", reason)
    pair.loop.until(lambda: value(pair.sender.statistics(), "handshakes_refused_total", refused))
    assert value(pair.receiver.statistics(), "data_connections") == 0
    assert value(pair.sender.statistics(), "refusals_total", ("data", "no_session")) == 0
    pair.close()


def test_a_stage_without_peers_accepts_no_connection(keys: Keys, contexts: tuple[Any, Any]) -> None:
    """A decode server's, which has keys and no folder."""
    pair = Pair(contexts[0], geometry(16), geometry(16), connected=False)
    sender = Sender(keys.peer(), stage=0, geometry=geometry(16), store=pair.store, context=contexts[1])
    loop = Loop(sender)
    socket = contexts[0].socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = keys.public["peer"].encode()
    loop.raw.append(socket)
    socket.connect(f"tcp://127.0.0.1:{sender.port}")
    loop.until(lambda: value(sender.statistics(), "handshakes_refused_total", ("data", "not_allowed")))
    loop.close()
    pair.close()


def test_rubbish_in_place_of_a_greeting_costs_its_sender_the_connection(keys: Keys, contexts: tuple[Any, Any]) -> None:
    both = Knocking(keys, contexts, "peer", keys.public["server"])
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" + bytes(63), b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(99)):
        with create_connection(("127.0.0.1", both.control_server.port)) as raw:
            raw.sendall(data)
            for _ in range(5):
                both.loop.turn(0.01)
    assert both.loop.wait_for(both.control_client, PrefillUp)
    both.loop.close()
