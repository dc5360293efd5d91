"""Prefill and decode with different pipeline degrees, over real sockets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.core.messages.orders import CancelSend, DropPeer
from headrace.core.messages.stage_events import ChunkAcked, SendCancelled
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.protocol.messages import Ack, Attached, Chunk, Refuse
from tests.transfer.group import Group
from tests.transfer.harness import value
from tests.transfer.ranks import grid
from tests.transfer.raw import SESSION, RawPeer


def stages(page_size: int, layers: Sequence[int]) -> list[Geometry]:
    return grid(page_size, layers, heads=[2])


@pytest.mark.parametrize(
    ("source_split", "destination_split"),
    [((4,), (4,)), ((2, 2), (4,)), ((4,), (1, 3)), ((2, 3, 1), (3, 3)), ((1, 1, 1, 1), (2, 2)), ((3, 3), (1, 2, 2, 1))],
)
@pytest.mark.parametrize(("source_size", "destination_size", "start"), [(16, 16, 0), (8, 32, 5), (5, 3, 7)])
def test_every_stage_gets_its_own_layers_and_no_byte_more(
    context: Any, source_split: tuple[int, ...], destination_split: tuple[int, ...],
    source_size: int, destination_size: int, start: int,
) -> None:  # fmt: skip
    end = 60
    group = Group(context, stages(source_size, source_split), stages(destination_size, destination_split))
    pages, dst = range(40, 40 + -(-end // source_size)), range(30, 30 + -(-end // destination_size))
    for receiver in group.receivers:
        group.connect(receiver)
    group.hand_over(start, end, [start, 16, 45, end], pages, dst)
    for sender, geometry in zip(group.senders, group.sources, strict=True):
        assert [event.chunk for event in group.loop.of(sender, ChunkAcked)] == [0, 1, 2]
        assert sum(event.bytes for event in group.loop.of(sender, ChunkAcked)) == (end - start) * geometry.token_bytes
        assert value(sender.statistics(), "bytes_sent_total", ("zmq",)) == (end - start) * geometry.token_bytes
    sent = group.positions(group.stores, group.sources, pages, start, end - start)
    assert np.array_equal(group.positions(group.targets, group.destinations, dst, start, end - start), sent)
    group.close()


def test_a_chunk_is_acknowledged_only_when_the_stage_that_attached_last_has_it(context: Any) -> None:
    group = Group(context, stages(16, (4,)), stages(16, (2, 2)))
    [sender] = group.senders
    first, second = (RawPeer(context, group.loop, sender.port, peer_stage=stage) for stage in (0, 1))
    group.send(sender, 0, 0, 16, last=True, pages=range(1), dst=range(1))
    for peer in (first, second):
        assert isinstance(peer.take()[0], Attached)
        header, (_, payload) = peer.take()
        assert isinstance(header, Chunk)
        layers = slice(0, 2) if peer is first else slice(2, 4)
        assert payload == group.stores[0].data[0, layers].tobytes()
    first.say(Ack(ticket="t", generation=1, chunk=0))
    group.loop.until(lambda: value(sender.statistics(), "unacked_bytes") == len(payload) + 256)
    for _ in range(5):
        group.loop.turn(0.01)
    assert not group.loop.of(sender, ChunkAcked)
    second.say(Ack(ticket="t", generation=1, chunk=0))
    assert group.loop.wait_for(sender, ChunkAcked).bytes == 2 * len(payload)
    group.close()


def test_a_stage_that_never_attached_keeps_the_chunk_and_a_cancel_still_gets_quiet(context: Any) -> None:
    group = Group(context, stages(16, (4,)), stages(16, (2, 2)))
    [sender] = group.senders
    peer = RawPeer(context, group.loop, sender.port)
    group.send(sender, 0, 0, 16, last=True, pages=range(1), dst=range(1))
    assert isinstance(peer.take()[0], Attached)
    assert isinstance(peer.take()[0], Chunk)
    peer.say(Ack(ticket="t", generation=1, chunk=0))
    group.loop.until(lambda: value(sender.statistics(), "unacked_bytes") == 0)
    assert value(sender.statistics(), "queued_chunks") == 1
    assert not group.loop.of(sender, ChunkAcked)
    group.loop.apply(sender, CancelSend(seq=0, request=1))
    group.loop.wait_for(sender, SendCancelled)
    assert value(sender.statistics(), "queued_chunks") == 0
    group.loop.apply(sender, DropPeer(seq=0, session=SESSION))
    peer.say(Ack(ticket="t", generation=1, chunk=0))
    refused = peer.take()[0]
    assert isinstance(refused, Refuse)
    assert refused.code == "no_session"
    group.close()


def test_a_stage_without_layers_in_common_is_refused(context: Any) -> None:
    group = Group(context, stages(16, (2, 2)), stages(16, (1, 3)))
    for stage, peer_stage in ((0, 7), (1, 0)):
        peer = RawPeer(context, group.loop, group.senders[stage].port, stage=stage, peer_stage=peer_stage)
        refused = peer.take()[0]
        assert isinstance(refused, Refuse)
        assert refused.code == "wrong_stage"
        assert refused.message == f"stage {stage} shares no layers and heads with stage {peer_stage} of the peer"
    group.close()
