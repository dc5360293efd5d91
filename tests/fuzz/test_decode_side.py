"""A decode side whose prefill server sends anything: its loop goes on, and pages not reserved stay as they were."""

import secrets
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import AskReserve, ConnectPrefill, PrefillUp
from headrace.core.types.packed import pack
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.control.client import ControlClient
from headrace.transfer.data.receiver import Receiver
from tests.conformance.peers import GEOMETRY
from tests.conformance.scripted import FINGERPRINT, TICKET, TOKENS, Scripted, row
from tests.fuzz.mutations import VALID, Mutator
from tests.transfer.control.session_table import hello
from tests.transfer.harness import CONFIG, Loop, random_store, value, zmq_context

PAGES = [9, 3, 12]


class Victim:
    """A control client and a receiver, up and with one ticket reserved at the scripted server."""

    def __init__(self, context: Any, server: Scripted) -> None:
        self.server = server
        self.store = random_store(GEOMETRY, 16)
        self.before = self.store.data.copy()
        self.control_client = ControlClient(CONFIG, context)
        self.receiver = Receiver(CONFIG, stage=0, geometry=GEOMETRY, store=self.store, context=context)
        self.loop = Loop(self.control_client, self.receiver)
        self.loop.raw += [server.control_server, server.stage]
        self.requests = 0
        self.session = ""
        ours = hello(fingerprint=FINGERPRINT, geometries=(GEOMETRY,), kv_pages=16, metadata_rows=4)
        self.control_client.ready(ours)
        self.loop.apply(
            self.control_client, ConnectPrefill(name="p", endpoint=f"tcp://127.0.0.1:{server.control_port}")
        )

    def listen(self) -> None:
        """Let the server hear what has come, and answer each Hello and Attach."""
        server = self.server
        while server.control_server.poll(0) or server.stage.poll(0):
            for socket in (server.control_server, server.stage):
                if socket.poll(0):
                    message = server._take(socket)
                    if message["type"] == "Hello":
                        server.hello, server.session = message, secrets.token_hex(16)
                        server.welcome()
                    elif message["type"] == "Attach":
                        server.send({"type": "Attached", "stage": 0})
                    elif message["type"] == "Reserve":
                        server.reserve = message

    def reserve(self) -> None:
        """Be up, with a new ticket's pages expected; again, where the session ends meanwhile."""
        while not self._try_to_reserve():
            self.turn()

    def _try_to_reserve(self) -> bool:
        while not self.loop.of(self.control_client, PrefillUp) or self.loop.of(self.control_client, PrefillUp)[
            -1
        ].session != (self.server.session):
            self.turn()
        up = self.loop.of(self.control_client, PrefillUp)[-1]
        if up.session != self.session:
            self.loop.apply(self.receiver, CloseSession(seq=0, session=self.session))
            self.session, self.server.data_route = up.session, b""
            self.loop.apply(
                self.receiver,
                OpenSession(seq=0, terms=up.terms),
            )  # fmt: skip
        self.loop.apply(self.receiver, CancelReceive(seq=0, request=self.requests))
        self.requests += 1
        names: dict[str, Any] = {"ticket": TICKET, "generation": self.requests, "pages": pack(PAGES), "row": 2}
        prepare = PrepareReceive(seq=0, request=self.requests, session=up.session, start=0, count=TOKENS, **names)
        self.loop.apply(self.receiver, prepare)
        reservation = Reservation(prompt_tokens=TOKENS, cached_tokens=0, **names)
        self.loop.apply(self.control_client, AskReserve(session=up.session, reservation=reservation))
        for _ in range(20):
            if self.server.reserve.get("generation") == self.requests and self.server.data_route:
                return True
            self.turn()
        return False

    def turn(self) -> None:
        self.loop.turn(0.005)
        self.listen()


@pytest.mark.parametrize("rounds", [pytest.param(25, id="short"), pytest.param(300, id="long", marks=pytest.mark.full)])
def test_a_decode_side_survives_its_prefill_server(rounds: int) -> None:
    mutator = Mutator(1)
    with zmq_context() as context:
        server = Scripted(context, timeout_s=1.0)
        victim = Victim(context, server)
        for _ in range(rounds):
            victim.reserve()
            generation = server.reserve["generation"]
            header, frames = server.chunk(0, 0, TOKENS, last=True)
            good = [
                *VALID,
                msgspec.msgpack.encode(header),
                msgspec.msgpack.encode({"type": "Finished", "ticket": TICKET, "generation": generation,
                                        "metadata": row(TICKET, generation)}),
                msgspec.msgpack.encode({"type": "Refuse", "code": "c", "message": "m\n"}),
            ]  # fmt: skip
            for _ in range(4):
                server.control_server.send_multipart((server.control_route, mutator.any(good)))
                body = [frame if mutator.random.random() < 0.5 else mutator.spoil(frame) for frame in frames]
                server.stage.send_multipart((server.data_route, mutator.any(good), *body))
            for _ in range(3):
                victim.turn()
        received = victim.receiver.statistics()
        assert value(received, "malformed_frames_total", ("receiver",)) > 0
        assert value(victim.control_client.statistics(), "malformed_frames_total", ("control_client",)) > 0
        others = np.delete(np.arange(16), PAGES)
        assert np.array_equal(victim.store.data[others], victim.before[others])
        victim.reserve()
        header, frames = server.chunk(0, 0, TOKENS, last=True)
        done = value(received, "chunks_received_total")
        server.send(header, *frames)
        victim.loop.until(lambda: value(victim.receiver.statistics(), "chunks_received_total") > done)
        victim.loop.raw.clear()
        victim.loop.close()
        server.close()
