"""Live prefill servers and peers that never read: the pages come back, memory is bounded, all others are served."""

import re
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest

from tests.conformance.client import Client, Target, answer
from tests.e2e.harness import Server, pages_in_use, serving, wait_until
from tests.fuzz.test_live import everything, processes
from tests.fuzz.test_live import hand_over as hand_over_long
from tests.transfer.harness import zmq_context
from tests.transfer.plain import Plain

MODEL = (
    "--model",
    "stub:layers=16,hidden=128",
    "--dtype",
    "float32",
    "--kv-pages",
    "400",
    "--max-model-len",
    "2048",
)
GEOMETRY = {"dtype": "float32", "layers": 16, "kv_heads": 1, "head_dim": 128, "page_size": 16}  # 16 KiB a token
TRANSFER_S = 6.0  # an honest peer in this process answers later than in 2 s when the machine is busy
DEADLINES = ("--transfer-timeout", f"{TRANSFER_S:g}", "--stage-timeout", "4", "--peer-timeout", "20")
MARGIN_S = 3.0
PING = msgspec.msgpack.encode({"type": "Ping", "number": 0})
GROWTH_BYTES = 48 << 20  # of one process; without limits it is many times that
ATTACK_S = 2.0


def target_of(server: Server) -> Target:
    handoff = server.get("/v1/handoff").json()
    return Target(
        server.url, f"tcp://127.0.0.1:{handoff['control_port']}", "127.0.0.1", handoff["fingerprint"], GEOMETRY
    )


def hand_over(client: Client, data: Any, ticket: str) -> None:
    """A short prompt from the server to an honest peer, which acknowledges it."""
    client.reserve(ticket, tokens=40)
    prefill = client.prefill(ticket, 40)
    chunk, _ = client.take(data)
    assert (chunk["type"], chunk["ticket"]) == ("Chunk", ticket)
    answer(data, chunk)
    assert client.heard() == {"type": "Finished", "ticket": ticket, "generation": 1}
    assert prefill.answer().status_code == 200


def attached(client: Client) -> Plain:
    """A data connection of a session, which is not read any more."""
    data = Plain(client.welcome["stages"][0]["data_port"])
    attach = {"type": "Attach", "session": client.welcome["session"], "stage": 0, "checksum": "xxh3_64"}
    while True:
        data.say(msgspec.msgpack.encode(attach))
        if msgspec.msgpack.decode(data.take())["type"] == "Attached":
            return data


@pytest.mark.full
def test_a_peer_that_pings_and_never_reads_loses_its_session_and_others_lose_nothing() -> None:
    with serving("--role", "prefill", *MODEL, *DEADLINES, "--chunk-tokens", "256") as server, zmq_context() as context:
        target, before = target_of(server), {child.pid for child in server.children()}
        with closing(Client(context, target)) as honest, closing(Client(context, target)) as mute, ExitStack() as idle:
            honest.hello()
            data = honest.attached()
            mute.hello(max_model_len=2048, kv_pages=256, window_bytes=1 << 30)
            unread = idle.enter_context(attached(mute))
            mute.reserve("stuck", tokens=2048 - 16)  # 32 MiB, which no kernel takes in
            prefill = mute.prefill("stuck", 2048 - 16)
            wait_until(lambda: pages_in_use(server) > 100, 20, "it is computed")
            handed_over, ended = 0, None
            deadline = time.monotonic() + 20
            while pages_in_use(server) > 0:
                assert time.monotonic() < deadline, f"pages come back\n{server.log}"
                mute.say({"type": "Ping", "number": 0})
                unread.say(PING)
                hand_over(honest, data, f"meanwhile-{handed_over}")
                handed_over += 1
                if ended is None and server.metrics()["headrace_control_sessions"] == 1:
                    ended = time.monotonic()
            late = ended is not None and time.monotonic() - ended > MARGIN_S
            assert not late, "once the session has ended nothing waits for the peer"
            refused = prefill.answer()
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, "peer_gone")
            assert mute.heard()["type"] == "Goodbye"
            hand_over(honest, data, "after")
        assert {child.pid for child in server.children()} == before, "no stage has ended"
        assert handed_over > 0
        assert server.get("/ready").status_code == 200


def join(version: str = "0") -> bytes:
    """Of a stage that does not belong here."""
    fields = {"rank": 7, "world_size": 1, "incarnation": "x" * 16, "version": version, "host": "h", "key": "sesame"}
    return msgspec.msgpack.encode({"type": "JoinRequest", **fields})


def hello(target: Target) -> bytes:
    """Of one peer, again and again."""
    fields = {
        "protocols": [1], "instance": "i" * 32, "name": "loud", "role": "decode", "fingerprint": target.fingerprint,
        "geometries": [target.geometry], "kv_pages": 64, "max_model_len": 1024, "metadata_version": 1,
        "metadata_bytes": 256, "metadata_rows": 4, "window_bytes": 1 << 20, "checksums": ["xxh3_64"],
        "backends": ["zmq"],
    }  # fmt: skip
    return msgspec.msgpack.encode({"type": "Hello", **fields})


def flood(make: Callable[[], Plain], message: bytes, meanwhile: Callable[[], None]) -> tuple[Plain, int]:
    """Say something as fast as it is taken, reading nothing; on a new connection where one is closed. Returns the last
    one, still open, and how many there were."""
    peer, made, end = make(), 1, time.monotonic() + ATTACK_S
    while (now := time.monotonic()) < end:
        meanwhile()
        while time.monotonic() < now + 0.5:
            peer.say(message, 500)
            if peer.closed:
                peer.socket.close()
                peer, made = make(), made + 1
    return peer, made


@pytest.mark.full
def test_flooding_a_port_without_reading_answers_costs_a_few_megabytes() -> None:
    with everything() as (server, target, stage_port), zmq_context() as context:
        found = re.search(r"data   tcp://127\.0\.0\.1:(\d+)", server.log)
        assert found is not None
        data_port, control_port = int(found[1]), int(target.control_server.rpartition(":")[2])
        with closing(Client(context, target)) as honest, closing(Client(context, target)) as loud:
            honest.hello()
            data = honest.attached()
            loud.hello()

            def keep() -> None:
                for client in (honest, loud):
                    client.say({"type": "Ping", "number": 0})

            ways: dict[str, tuple[Callable[[], Plain], bytes]] = {
                "data": (lambda: Plain(data_port), b"\xc1"),
                "control_server": (lambda: Plain(control_port), b"\xc1"),
                "stages": (lambda: Plain(stage_port), join()),
                "hellos": (lambda: Plain(control_port), hello(target)),
                "pings": (lambda: attached(loud), PING),
            }
            for number, (name, (make, message)) in enumerate(ways.items()):
                hand_over_long(honest, data, f"before-{name}")
                before = processes(server)
                peer, made = flood(make, message, keep)
                with peer:
                    after = processes(server)
                    assert after.keys() == before.keys(), "no process has ended"
                    growth = {pid: (after[pid] - before[pid]) >> 20 for pid in after}
                    print(name, made, growth)
                    assert max(growth.values()) << 20 < GROWTH_BYTES, (name, growth)
                    hand_over_long(honest, data, f"beside-{name}-{number}")
        metrics = server.metrics()
        assert metrics['headrace_connections_closed_total{reason="refused",socket="data"}'] > 0
        assert metrics['headrace_connections_closed_total{reason="refused",socket="control"}'] > 0
        assert metrics['headrace_refusals_total{reason="too_many_joins",socket="stages"}'] > 0
        assert server.log.count("closed a connection of") < 10, "what others cause is logged once in a while"
