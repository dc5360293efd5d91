"""docs/protocol.md from the prefill server's side, against any decode side.

HEADRACE_PEER names the command of another one, with the flags and the output of examples/minimal_peer.py; by default it
is that file, and the control client and receiver of a decode server. HEADRACE_PEER_COMPONENTS=1 says that the other
can have components: then all tests are run a second time, with the flag --component and a digest that covers its KV as
well. HEADRACE_PEER_REPLICAS=1 says that the other knows the field `replica` of stages.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.conformance.peers import Peer, Running, command, minimal, ours, ours_with_a_latent
from tests.conformance.scripted import TICKET, TOKEN, TOKEN_BYTES, TOKENS, Scripted, row, whole
from tests.transfer.harness import zmq_context

OTHER = os.environ.get("HEADRACE_PEER")


class Case(NamedTuple):
    """A peer, and whether it and the server have a component."""

    peer: Peer
    latent: bool = False


CASES: list[Any] = [
    Case(ours), Case(minimal), pytest.param(Case(ours_with_a_latent, latent=True), marks=pytest.mark.full),
]  # fmt: skip
if OTHER:
    CASES = [Case(command(OTHER))]
    if os.environ.get("HEADRACE_PEER_COMPONENTS"):
        CASES.append(Case(command(OTHER, latent=True), latent=True))


@pytest.fixture(params=CASES, ids=lambda case: case.peer.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def server(case: Case) -> Iterator[Scripted]:
    with zmq_context() as context:
        made = Scripted(context, latent=case.latent)
        yield made
        made.close()


class Fetching(Running):
    """The peer, told of the server and under way."""

    def __init__(self, case: Case, server: Scripted) -> None:
        super().__init__(case.peer, server.url)
        self._sha256 = hashlib.sha256(whole(case.latent)).hexdigest()

    def arrived(self) -> bool:
        found = self.result()
        return (found.token, found.sha256, found.failure) == (TOKEN, self._sha256, "")


@pytest.fixture
def peer(case: Case, server: Scripted) -> Iterator[Fetching]:
    made = Fetching(case, server)
    yield made
    made.result()


def test_a_ticket_from_hello_to_finished(server: Scripted, peer: Fetching) -> None:
    hello = server.greet()
    assert 1 in hello["protocols"]
    assert (hello["metadata_version"], hello["metadata_bytes"]) == (1, 256)
    assert len(hello["instance"]) >= 16
    server.welcome()
    attach = server.came("Attach")
    assert (attach["session"], attach["stage"]) == (server.session, 0)
    server.send({"type": "Attached", "stage": 0, "a_later_field": True})
    reserve = server.reserved()
    assert (reserve["ticket"], reserve["prompt_tokens"], reserve["cached_tokens"]) == (TICKET, TOKENS, 0)
    size = hello["geometries"][0]["page_size"]
    pages = [reserve["pages"][at : at + 4] for at in range(0, len(reserve["pages"]), 4)]
    assert len(set(pages)) == len(pages) == -(-TOKENS // size)
    assert all(int.from_bytes(page, "little") < hello["kv_pages"] for page in pages)
    assert reserve["row"] < hello["metadata_rows"]
    for number, (start, count) in enumerate(((0, 10), (10, 20), (30, 10))):
        assert server.deliver(number, start, count, last=number == 2)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_chunks_in_any_order_and_more_than_once(server: Scripted, peer: Fetching) -> None:
    server.open()
    for number in (2, 0, 0, 2, 1):
        start, count = ((0, 16), (16, 16), (32, 8))[number]
        assert server.deliver(number, start, count, last=number == 2)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_a_last_chunk_may_bring_no_positions(server: Scripted, peer: Fetching) -> None:
    server.open()
    assert server.deliver(0, 0, TOKENS)["type"] == "Ack"
    assert server.deliver(1, TOKENS, 0, last=True)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_what_was_not_reserved_is_refused_and_does_no_harm(server: Scripted, peer: Fetching) -> None:
    reserve = server.open()
    wrong = [b"\xee" * len(frame) for frame in server.kv()]
    assert server.deliver(0, 0, TOKENS, frames=wrong, generation=reserve["generation"] + 1)["type"] == "Nack"
    assert server.deliver(0, 0, TOKENS, frames=wrong, ticket="another")["type"] == "Nack"
    assert server.deliver(0, 0, TOKENS, last=True)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


FOREIGN_PAGE = (1 << 20).to_bytes(4, "little")
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("checksum", {"checksum": 1}, "checksum_mismatch"),
    ("no checksum", {"checksum": None}, "checksum_mismatch"),
    ("page", {"pages": FOREIGN_PAGE * 3}, "bad_chunk"),
    ("fewer pages", {"pages": b""}, "bad_chunk"),
    ("row", {"row": 1 << 20}, "bad_chunk"),
    ("beyond the end", {"start": 16}, "bad_chunk"),
    ("size", {"payload_bytes": 1}, "bad_chunk"),
    ("total", {"total": 3}, "bad_chunk"),
    ("no frames", {"frames": []}, "bad_chunk"),
    ("one frame", {"frames": [bytes(TOKENS * TOKEN_BYTES + 256)]}, "bad_chunk"),
    ("metadata of another ticket", {"metadata": row("another", 1)}, "bad_metadata"),
    ("metadata of another generation", {"metadata": row(TICKET, 77)}, "bad_metadata"),
    ("metadata of another version", {"metadata": row(TICKET, 1, version=2)}, "bad_metadata"),
    ("no metadata", {"metadata": bytes(256)}, "bad_metadata"),
]


@pytest.mark.parametrize(("changes", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_chunk_fails_the_ticket(server: Scripted, peer: Fetching, changes: dict[str, Any], code: str) -> None:
    reserve = server.open()
    if changes.get("metadata") == row(TICKET, 1, version=2):
        changes = {"metadata": row(TICKET, reserve["generation"], version=2)}
    if changes.get("metadata") == row("another", 1):
        changes = {"metadata": row("another", reserve["generation"])}
    answer = server.deliver(0, 0, TOKENS, last=True, **changes)
    assert (answer["type"], answer["code"]) == ("Nack", code)
    assert code in peer.result().failure


def test_chunks_that_leave_a_gap_fail_the_ticket(server: Scripted, peer: Fetching) -> None:
    server.open()
    assert server.deliver(0, 0, 16)["type"] == "Ack"
    assert server.deliver(1, 32, 8, last=True)["type"] == "Nack"
    assert "bad_chunk" in peer.result().failure


def test_a_failed_ticket_fails_with_the_servers_reason(server: Scripted, peer: Fetching) -> None:
    reserve = server.open()
    names = {"ticket": TICKET, "generation": reserve["generation"]}
    server.say({"type": "Failed", **names, "code": "stage_failed", "message": "stage 0 ended", "status": 503})
    found = peer.result().failure
    assert "stage_failed" in found
    assert "stage 0 ended" in found


def test_a_first_token_that_ended_the_request_brings_no_kv(server: Scripted, peer: Fetching) -> None:
    generation = server.open()["generation"]
    data = row(TICKET, generation, token=11, finish=1)
    server.say({"type": "Finished", "ticket": TICKET, "generation": generation, "metadata": data})
    found = peer.result()
    assert (found.token, found.sha256, found.failure) == (11, None, "")


@pytest.mark.parametrize("ticket", ["another", ""])
def test_metadata_of_another_ticket_ends_nothing_well(server: Scripted, peer: Fetching, ticket: str) -> None:
    generation = server.open()["generation"]
    data = row(ticket, generation) if ticket else b"rubbish"
    server.say({"type": "Finished", "ticket": TICKET, "generation": generation, "metadata": data})
    assert "bad_metadata" in peer.result().failure


BAD_ROWS: list[dict[str, int]] = [
    {"finish": 3},
    {"token": -1},
    {"prompt": -1},
    {"cached": TOKENS + 1},
    {"cached": -1},
]


@pytest.mark.parametrize("fields", BAD_ROWS, ids=str)
def test_metadata_that_cannot_be_fails_the_ticket(server: Scripted, peer: Fetching, fields: dict[str, int]) -> None:
    generation = server.open()["generation"]
    answer = server.deliver(0, 0, TOKENS, last=True, metadata=row(TICKET, generation, **fields))
    assert (answer["type"], answer["code"]) == ("Nack", "bad_metadata")
    assert "bad_metadata" in peer.result().failure


def test_a_ticket_that_goes_on_is_not_finished_without_its_kv(server: Scripted, peer: Fetching) -> None:
    generation = server.open()["generation"]
    data = row(TICKET, generation, finish=0)
    server.say({"type": "Finished", "ticket": TICKET, "generation": generation, "metadata": data})
    found = peer.result()
    assert ("bad_metadata" in found.failure, found.token) == (True, None)


UNFIT: list[dict[str, Any]] = [
    {"protocol": 2},
    {"fingerprint": "another-model"},
    {"checksum": "crc32"},
    {"backend": "pigeon"},
    {"components": [{"name": "draft", "dtype": "float32", "shape": [1, 2, 1, 4]}]},
]


@pytest.mark.parametrize("changes", UNFIT, ids=lambda changes: next(iter(changes)))
def test_a_welcome_that_does_not_fit_is_left_alone(server: Scripted, peer: Fetching, changes: dict[str, Any]) -> None:
    server.greet()
    server.welcome(**changes)
    assert server.quiet("Reserve", 0.3)
    assert "mismatch" in peer.result().failure


@pytest.mark.parametrize("changes", [{"layers": 3}, {"head_dim": 8}, {"dtype": "float16"}, {"page_size": 0}])
def test_a_stage_that_does_not_fit_is_left_alone(server: Scripted, peer: Fetching, changes: dict[str, Any]) -> None:
    server.greet()
    geometry = server.geometry | changes
    server.welcome(stages=[{"rank": 0, "data_port": server.data_port, "geometry": geometry}])
    assert server.quiet("Reserve", 0.3)
    assert "mismatch" in peer.result().failure


def open_replicas(server: Scripted) -> list[bytes]:
    """As far as the Reserve, of a server with two replicas of one stage each; returns the data connections to them."""
    server.greet()
    stage = {"data_port": server.data_port, "geometry": server.geometry}
    server.welcome(stages=[{"rank": 0, **stage}, {"rank": 1, **stage, "replica": 1}])
    routes = {}
    while len(routes) < 2:
        number = server.came("Attach")["stage"]
        routes[number] = server.data_route
        server.send({"type": "Attached", "stage": number})
    server.reserved()
    return [routes[0], routes[1]]


def knows_replicas(case: Case) -> bool:
    return case.peer in (ours, ours_with_a_latent) or bool(OTHER and os.environ.get("HEADRACE_PEER_REPLICAS"))


def test_a_ticket_comes_from_one_replica(case: Case, server: Scripted, peer: Fetching) -> None:
    """Which one, the first chunk says; nothing is missing of the others. A peer that does not know the field finds each
    head of each layer twice, and takes nothing."""
    if not knows_replicas(case):
        server.greet()
        stage = {"data_port": server.data_port, "geometry": server.geometry}
        server.welcome(stages=[{"rank": 0, **stage}, {"rank": 1, **stage, "replica": 1}])
        assert server.quiet("Reserve", 0.3)
        assert "mismatch" in peer.result().failure
        return
    routes = open_replicas(server)
    for number, (start, count) in enumerate(((0, 16), (16, 24))):
        server.data_route = routes[1]
        assert server.deliver(number, start, count, last=number == 1)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_chunks_of_another_replica_are_refused(case: Case, server: Scripted, peer: Fetching) -> None:
    if not knows_replicas(case):
        server.greet()
        server.welcome(protocol=2)
        return
    routes = open_replicas(server)
    server.data_route = routes[1]
    assert server.deliver(0, 0, 16)["type"] == "Ack"
    server.data_route = routes[0]
    answer = server.deliver(0, 0, 16)
    assert (answer["type"], answer["code"]) == ("Nack", "bad_chunk")
    assert "replica" in peer.result().failure


def test_replicas_without_a_layer_are_left_alone(server: Scripted, peer: Fetching) -> None:
    """Each replica has to have every head of every layer."""
    server.greet()
    short = server.geometry | {"layers": 1}
    stages = [{"rank": 0, "data_port": server.data_port, "geometry": server.geometry}]
    server.welcome(stages=[*stages, {"rank": 1, "data_port": server.data_port, "geometry": short, "replica": 1}])
    assert server.quiet("Reserve", 0.3)
    assert "mismatch" in peer.result().failure


def test_a_server_that_is_not_ready_is_asked_again_on_a_fresh_connection(server: Scripted, peer: Fetching) -> None:
    server.greet()
    first = server.control_route
    server.say({"type": "Refuse", "code": "not_ready", "message": "loading"})
    server.open()
    assert server.control_route != first
    assert server.deliver(0, 0, TOKENS, last=True)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_a_refused_attach_is_tried_again(server: Scripted, peer: Fetching) -> None:
    server.greet()
    server.welcome()
    server.came("Attach")
    server.send({"type": "Refuse", "code": "no_session", "message": "not heard of it yet"})
    server.came("Attach")
    server.send({"type": "Attached", "stage": 0})
    server.reserved()
    assert server.deliver(0, 0, TOKENS, last=True)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_rubbish_and_unknown_messages_are_skipped(server: Scripted, peer: Fetching) -> None:
    server.open()
    for data in (b"", b"\xc1", b"\x81\xa4type\xa5Wrong", b"\x82\xa4type\xa4Pong\xa1x" + b"\x91" * 5000 + b"\xc0"):
        server.control_server.send_multipart((server.control_route, data))
        server.stage.send_multipart((server.data_route, data))
    server.say({"type": "ALaterMessage", "field": 1})
    assert server.deliver(0, 0, TOKENS, last=True)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_a_peer_that_waits_says_that_it_is_alive(server: Scripted, peer: Fetching) -> None:
    server.open()
    before = server.pings
    assert server.quiet("Goodbye", 1.5 * server.timeout_s)
    assert server.pings >= before + 4, "of two connections, every quarter of the timeout"
    assert server.deliver(0, 0, TOKENS, last=True)["type"] == "Ack"
    server.finish()
    assert peer.arrived()


def test_a_goodbye_ends_the_ticket(server: Scripted, peer: Fetching) -> None:
    server.open()
    server.say({"type": "Goodbye", "reason": "the server ends"})
    assert "the server ends" in peer.result().failure


def test_a_control_endpoint_that_falls_silent_is_gone(server: Scripted, peer: Fetching) -> None:
    server.open()
    assert "silent" in peer.result().failure
