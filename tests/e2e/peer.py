"""A decode peer by hand: it speaks the protocol to a live prefill server and keeps the bytes that come."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from headrace.core.config import TransferConfig
from headrace.core.runtime.codec import Codec
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.protocol import checksum, metadata
from headrace.transfer.protocol.layout import pages_for
from headrace.transfer.protocol.matching import make_hello
from headrace.transfer.protocol.messages import (
    NO_SESSION,
    Ack,
    AnswerMessage,
    Attach,
    Attached,
    Cancel,
    Chunk,
    ControlMessage,
    Failed,
    Finished,
    PeerMessage,
    Ping,
    Pong,
    Refuse,
    Reserve,
    StageMessage,
    Welcome,
)
from tests.e2e.harness import Server, pages_in_use, wait_until

PAGES = 256
PATIENCE_MS = 30_000
PING_MS = 500


class Peer:
    """One session at the control endpoint, one data connection to each stage. geometry: of the whole model, in our
    pages."""

    def __init__(self, context: Any, server: Server, geometry: Geometry) -> None:
        handoff = server.get("/v1/handoff").json()
        self.geometry = geometry
        self._to_control_server: Codec[PeerMessage] = Codec(PeerMessage)
        self._from_control_server: Codec[ControlMessage] = Codec(ControlMessage)
        self._to_stage: Codec[AnswerMessage] = Codec(AnswerMessage)
        self._from_stage: Codec[StageMessage] = Codec(StageMessage)
        self._control_server = self._connect(context, handoff["control_port"])
        hello = make_hello(
            TransferConfig(), instance=secrets.token_hex(16), name="by hand", role="decode",
            fingerprint=handoff["fingerprint"], geometries=(geometry,), kv_pages=PAGES, max_model_len=2048,
            metadata_rows=8,
        )  # fmt: skip
        self.say(hello)
        welcome = self.hear()
        assert isinstance(welcome, Welcome), welcome
        self._stages = welcome.stages
        self._data = [self._attached(context, welcome.session, rank) for rank in range(len(welcome.stages))]

    def say(self, message: PeerMessage) -> None:
        self._control_server.send(self._to_control_server.encode(message))

    def hear(self) -> ControlMessage:
        """What the control endpoint says next; answers to pings are passed over."""
        while True:
            assert self._control_server.poll(PATIENCE_MS), "the control endpoint is silent"
            message = self._from_control_server.decode(self._control_server.recv())
            if not isinstance(message, Pong):
                return message

    def ping(self, *renew: str) -> None:
        self.say(Ping(number=1, renew=renew))

    def cancel(self, ticket: str, generation: int = 0) -> ControlMessage:
        self.say(Cancel(ticket=ticket, generation=generation))
        return self.hear()

    def reserve(self, ticket: str, tokens: int, *, wait: bool = True) -> None:
        pages = range(pages_for(self.geometry.page_size, 0, tokens))
        self.say(
            Reserve(
                ticket=ticket, generation=1, prompt_tokens=tokens, cached_tokens=0, pages=pack(pages), row=0, wait=wait
            )
        )

    def answer(self, ticket: str, tokens: int) -> Failed | Finished:
        """Reserve a ticket that ends without a byte."""
        self.reserve(ticket, tokens, wait=False)
        message = self.hear()
        assert isinstance(message, Failed | Finished), message
        return message

    def receive(self, tokens: int) -> tuple[np.ndarray, FirstToken]:
        """Take every chunk of the reserved ticket: its KV [layers, 2, kv_heads, tokens, head_dim], the first token."""
        parts = [self._receive(rank, tokens) for rank in range(len(self._data))]
        assert self.hear() == Finished(ticket=parts[0][2], generation=1)
        return np.concatenate([kv for kv, _, _ in parts]), parts[0][1]

    def _receive(self, rank: int, tokens: int) -> tuple[np.ndarray, FirstToken, str]:
        source = self._stages[rank].geometry
        kv = np.full((source.layers, 2, source.kv_heads, tokens, source.head_dim), np.nan, np.float32)
        missing = tokens
        while True:
            chunk, frames = self._take(self._data[rank])
            assert isinstance(chunk, Chunk)
            assert chunk.checksum == checksum.of_frames(frames)
            row = frames.pop(0) if chunk.total else b""
            at = chunk.start
            for frame in frames:
                count = min(source.page_size - at % source.page_size, chunk.start + chunk.count - at)
                shape = (source.layers, 2, source.kv_heads, count, source.head_dim)
                kv[:, :, :, at : at + count] = np.frombuffer(frame, np.float32).reshape(shape)
                at += count
            missing -= chunk.count
            ack = Ack(ticket=chunk.ticket, generation=chunk.generation, chunk=chunk.chunk)
            self._data[rank].send(self._to_stage.encode(ack))
            if chunk.total:
                assert missing == 0
                assert not np.isnan(kv).any()
                return kv, metadata.decode(row).first, chunk.ticket

    def _take(self, socket: Any) -> tuple[StageMessage, list[bytes]]:
        """The next message of a stage; the session stays, however long the stage computes."""
        for _ in range(PATIENCE_MS // PING_MS):
            self.ping()
            if socket.poll(PING_MS):
                header, *frames = socket.recv_multipart()
                return self._from_stage.decode(header), frames
        raise AssertionError("the stage is silent")

    def _attached(self, context: Any, session: str, rank: int) -> Any:
        """A data connection to a stage. A stage may hear of a session later than its peer does."""
        attach = Attach(session=session, stage=rank, checksum="xxh3_64")
        while True:
            socket = self._connect(context, self._stages[rank].data_port)
            socket.send(self._to_stage.encode(attach))
            answer = self._take(socket)[0]
            if answer == Attached(stage=rank):
                return socket
            assert isinstance(answer, Refuse)
            assert answer.code == NO_SESSION, answer
            socket.close(linger=0)

    @staticmethod
    def _connect(context: Any, port: int) -> Any:
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket


@contextmanager
def joined(server: Server, geometry: Geometry) -> Iterator[Peer]:
    """A peer with a session; when it has left, the server has all of its pages back."""
    context: Any = zmq.Context()
    yield Peer(context, server, geometry)
    context.destroy(linger=0)
    wait_until(lambda: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")
