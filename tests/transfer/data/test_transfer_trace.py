"""What a sender notes of the chunks it sends, while it is to."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.core.messages.orders import AdmitPeer, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, SendFailed
from headrace.core.trace import Buffer, TransferTrace
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.data.sender import Sender
from headrace.transfer.protocol.messages import Ack, Attached, Chunk, Nack
from tests.transfer.harness import CLOCK, CONFIG, Loop, random_store, zmq_context
from tests.transfer.raw import SESSION, RawPeer

SOURCE = Geometry("float32", layers=4, kv_heads=1, head_dim=4, page_size=16)
HALVES = tuple(
    Geometry("float32", layers=2, kv_heads=1, head_dim=4, page_size=16, layer_start=start) for start in (0, 2)
)


class Bench:
    """A sender whose chunks go to two stages of a peer, half of the layers each."""

    def __init__(self, context: Any) -> None:
        self.transfers: Buffer[TransferTrace] = Buffer(100)
        self.sender = Sender(
            CONFIG, stage=0, geometry=SOURCE, store=random_store(SOURCE, 8), context=context, transfers=self.transfers
        )
        self.loop = Loop(self.sender)
        admit = AdmitPeer(seq=0, terms=PeerTerms(session=SESSION, geometries=HALVES, window_bytes=1 << 20))
        self.loop.apply(self.sender, admit)
        self.peers = [RawPeer(context, self.loop, self.sender.port, peer_stage=stage) for stage in (0, 1)]
        for peer in self.peers:
            assert isinstance(peer.take()[0], Attached)

    def send(self, request: int, chunk: int) -> list[Chunk]:
        """Order a chunk; what each of the peer's stages gets of it."""
        order = SendChunk(
            seq=0, request=request, after=0, session=SESSION, ticket=f"t{request}", generation=1, chunk=chunk,
            start=16 * chunk, count=16, pages=pack([chunk]), dst_pages=pack([chunk]), row=0, dst_row=0,
        )  # fmt: skip
        self.loop.apply(self.sender, order)
        chunks = [peer.take()[0] for peer in self.peers]
        assert all(isinstance(each, Chunk) for each in chunks)
        return chunks  # type: ignore[return-value]

    def ack(self, stage: int, chunk: Chunk) -> None:
        self.peers[stage].say(Ack(ticket=chunk.ticket, generation=chunk.generation, chunk=chunk.chunk))

    def unanswered(self) -> set[tuple[int, int, int]]:
        return {(each.request, each.chunk, each.peer_stage) for each in self.sender.unanswered(CLOCK.now())}


@pytest.fixture
def bench() -> Iterator[Bench]:
    with zmq_context() as context:
        made = Bench(context)
        yield made
        made.loop.close()


def test_each_part_of_a_chunk_from_when_it_was_sent_to_its_answer(bench: Bench) -> None:
    bench.transfers.start()
    began = CLOCK.now()
    parts = bench.send(5, 0)
    sent = CLOCK.now()
    assert bench.unanswered() == {(5, 0, 0), (5, 0, 1)}
    bench.ack(1, parts[1])
    bench.loop.until(lambda: len(bench.unanswered()) == 1)
    assert bench.unanswered() == {(5, 0, 0)}
    halfway = CLOCK.now()
    bench.ack(0, parts[0])
    bench.loop.wait_for(bench.sender, ChunkAcked)
    (second, first), dropped = bench.transfers.stop()
    assert dropped == 0
    assert (second.peer_stage, first.peer_stage) == (1, 0)
    for each in (second, first):
        assert (each.request, each.ticket, each.chunk, each.outcome) == (5, "t5", 0, "acknowledged")
        assert each.bytes == 16 * HALVES[0].token_bytes
        assert began <= each.sent <= sent <= each.ended
    assert second.ended <= halfway <= first.ended


def test_a_refused_chunk_and_one_without_an_answer(bench: Bench) -> None:
    bench.transfers.start()
    refused = bench.send(5, 0)[0]
    bench.send(6, 0)
    bench.peers[0].say(Nack(ticket="t5", generation=1, chunk=refused.chunk, code="checksum_mismatch", message="bad"))
    bench.loop.wait_for(bench.sender, SendFailed)
    kept, _ = bench.transfers.stop()
    assert [(each.request, each.peer_stage, each.outcome) for each in kept] == [(5, 0, "refused")]
    assert {(each.request, each.outcome) for each in bench.sender.unanswered(CLOCK.now())} >= {(6, "open")}


def test_nothing_is_kept_unless_it_records_but_what_was_sent_before_is_known(bench: Bench) -> None:
    before = bench.send(5, 0)
    late = bench.send(5, 1)
    bench.ack(0, before[0])
    bench.loop.until(lambda: len(bench.unanswered()) == 3)
    began = CLOCK.now()
    bench.transfers.start()
    bench.ack(0, late[0])
    bench.loop.until(lambda: len(bench.unanswered()) == 2)
    (only,), _ = bench.transfers.stop()
    assert only.chunk == 1
    assert only.sent < began <= only.ended
