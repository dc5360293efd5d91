"""The other side of a data connection, driven by hand: a stage that sends what it is told, a peer that answers so."""

from typing import Any

import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import OpenSession, PrepareReceive
from headrace.core.runtime.codec import Codec
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol import checksum, metadata
from headrace.transfer.protocol.messages import Ack, AnswerMessage, Attach, Attached, Chunk, Nack, Pong, StageMessage
from tests.transfer.harness import CONFIG, FIRST, Loop, random_store

SESSION = "s" * 32
ANSWERS: Codec[AnswerMessage] = Codec(AnswerMessage)
STAGE: Codec[StageMessage] = Codec(StageMessage)


class RawPeer:
    """A DEALER at a sender's data socket."""

    def __init__(
        self, context: Any, loop: Loop, port: int, *, session: str = SESSION, stage: int = 0, peer_stage: int = 0
    ) -> None:
        self.loop = loop
        self.socket = context.socket(zmq.DEALER)
        loop.raw.append(self.socket)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.say(Attach(session=session, stage=stage, checksum="xxh3_64", peer_stage=peer_stage))

    def say(self, message: AnswerMessage) -> None:
        self.socket.send(ANSWERS.encode(message))

    def take(self) -> tuple[StageMessage, list[bytes]]:
        self.loop.until(lambda: self.socket.poll(0))
        header, *frames = self.socket.recv_multipart()
        return STAGE.decode(header), frames

    def silent_for(self, turns: int = 5) -> bool:
        for _ in range(turns):
            self.loop.turn(0.01)
        return not self.socket.poll(0)


class RawStage:
    """A ROUTER that a real receiver attaches to. Expects request 1, tokens [0, 32), in pages 4 and 5 of 16."""

    def __init__(
        self,
        context: Any,
        *,
        config: TransferConfig = CONFIG,
        components: tuple[Component, ...] = (),
        options: dict[int, int] | None = None,
    ) -> None:
        self.geometry = Geometry("float32", layers=2, kv_heads=1, head_dim=4, page_size=16, components=components)
        self.socket = context.socket(zmq.ROUTER)
        for option, setting in (options or {}).items():
            self.socket.setsockopt(option, setting)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.target = random_store(self.geometry, 16, seed=3)
        self.untouched = self.target.data.copy()
        self.untouched_components = {name: data.copy() for name, data in self.target.tensors.items()}
        self.receiver = Receiver(config, stage=0, geometry=self.geometry, store=self.target, context=context)
        self.loop = Loop(self.receiver)
        self.loop.raw.append(self.socket)
        endpoints, geometries = (f"tcp://127.0.0.1:{port}",), (self.geometry,)
        self.loop.apply(
            self.receiver,
            OpenSession(
                seq=0,
                terms=PrefillTerms(session=SESSION, endpoints=endpoints, geometries=geometries, window_bytes=1 << 20),
            ),
        )
        self.loop.until(lambda: self.socket.poll(0))
        self.route, attach = self.socket.recv_multipart()
        assert isinstance(ANSWERS.decode(attach), Attach)
        self.say(Attached(stage=0))
        self.expect(1)

    def expect(self, request: int, generation: int = 1, draft: DraftTerms = NO_DRAFT) -> None:
        order = PrepareReceive(
            seq=0, request=request, session=SESSION, ticket="t", generation=generation, start=0, count=32,
            pages=pack([4, 5]), row=3, draft=draft,
        )  # fmt: skip
        self.loop.apply(self.receiver, order)

    def say(self, message: StageMessage, *frames: bytes) -> None:
        self.socket.send_multipart([self.route, STAGE.encode(message), *frames])

    def page(self, fill: int, tokens: int = 16) -> bytes:
        return bytes([fill]) * (tokens * self.geometry.tensors[0].token_bytes)

    def chunk(self, number: int, frames: list[bytes] | None = None, **changes: Any) -> tuple[Chunk, list[bytes]]:
        """Chunk 0 brings page 4 filled with 1, chunk 1 (the last) page 5 filled with 2, of keys and values; changes
        spoil the header."""
        last = number == 1
        row = [metadata.encode("t", changes.get("generation", 1), FIRST)] if last else []
        sent = [*row, self.page(number + 1)] if frames is None else frames
        fields: dict[str, Any] = {
            "ticket": "t", "generation": 1, "chunk": number, "start": 16 * number, "count": 16,
            "pages": pack([4 + number]), "row": 3, "payload_bytes": len(self.page(0)),
            "checksum": checksum.of_frames(sent), "total": 2 if last else 0,
        }  # fmt: skip
        return Chunk(**{**fields, **changes}), sent

    def send(self, number: int, frames: list[bytes] | None = None, **changes: Any) -> None:
        header, sent = self.chunk(number, frames, **changes)
        self.say(header, *sent)

    def answer(self) -> Ack | Nack:
        """The receiver's next Ack or Nack; its pings are answered."""
        while True:
            self.loop.until(lambda: self.socket.poll(0))
            self.route, body = self.socket.recv_multipart()
            message = ANSWERS.decode(body)
            if isinstance(message, Ack | Nack):
                return message
            self.say(Attached(stage=0) if isinstance(message, Attach) else Pong(number=message.number))

    def close(self) -> None:
        self.loop.close()
