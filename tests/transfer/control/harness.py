"""A control endpoint and a control client joined by a real socket, and a peer driven by hand."""

from typing import Any

import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import AskReserve, ConnectPrefill, PeerReserved, PrefillUp
from headrace.core.runtime.codec import Codec
from headrace.core.types.packed import pack
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.control.client import ControlClient
from headrace.transfer.control.server import ControlServer
from headrace.transfer.protocol.messages import ControlMessage, PeerMessage
from tests.transfer.control.session_table import OFFER, hello
from tests.transfer.harness import Loop

CONFIG = TransferConfig(peer_timeout_s=1.0)
PATIENT = TransferConfig(peer_timeout_s=60.0)  # of tests in which a session lasts, however slow the machine is
PEER: Codec[PeerMessage] = Codec(PeerMessage)
CONTROL: Codec[ControlMessage] = Codec(ControlMessage)


class Both:
    """A control endpoint and a control client, the control client told to connect to it."""

    def __init__(
        self, context: Any, *, ready: bool = True, control_context: Any = None, config: TransferConfig = CONFIG
    ) -> None:
        self.context = context
        self.control_server = ControlServer(config, control_context or context)
        self.control_client = ControlClient(config, context)
        self.loop = Loop(self.control_server, self.control_client)
        if ready:
            self.control_server.ready(OFFER)
        self.control_client.ready(hello(model="one"))
        self.endpoint = f"tcp://127.0.0.1:{self.control_server.port}"
        self.loop.apply(self.control_client, ConnectPrefill(name="p", endpoint=self.endpoint))

    @property
    def up(self) -> PrefillUp:
        return self.loop.wait_for(self.control_client, PrefillUp)

    def reserve(self, ticket: str = "t", generation: int = 1) -> PeerReserved:
        seen = len(self.loop.of(self.control_server, PeerReserved))
        ask = AskReserve(
            session=self.up.session,
            reservation=Reservation(
                ticket=ticket, generation=generation, prompt_tokens=40, cached_tokens=0, pages=pack([8, 9]), row=0
            ),
        )
        self.loop.apply(self.control_client, ask)
        return self.loop.wait_for(self.control_server, PeerReserved, seen + 1)


class Stranger:
    """A DEALER that says to the control endpoint what it is told."""

    def __init__(self, context: Any, both: Both) -> None:
        self.both = both
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(both.endpoint)
        both.loop.raw.append(self.socket)

    def ask(self, *frames: bytes) -> ControlMessage:
        self.socket.send_multipart(frames)
        self.both.loop.until(lambda: self.socket.poll(0))
        return CONTROL.decode(self.socket.recv())
