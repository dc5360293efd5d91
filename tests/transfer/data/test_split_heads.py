"""Prefill and decode with different tensor and pipeline degrees, over real sockets."""

from typing import Any

import numpy as np
import pytest

from headrace.core.messages.orders import AdmitPeer, CancelSend, DropPeer, ReleaseRequest, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, SendCancelled, SendFailed
from headrace.core.types.kv.backends import SHM, ZMQ
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.data.sender import Sender
from headrace.transfer.protocol.messages import Attached, Chunk, Refuse
from tests.transfer.group import Group
from tests.transfer.harness import CONFIG, Loop, random_store, value
from tests.transfer.ranks import grid
from tests.transfer.raw import SESSION, RawPeer

Split = tuple[tuple[int, ...], tuple[int, ...]]  # layers of each pipeline rank, KV heads of each tensor rank

PAIRS: list[tuple[str, Split, Split]] = [
    ("TP 2 to 4", ((4,), (4, 4)), ((4,), (2, 2, 2, 2))),
    ("TP 4 to 1", ((4,), (2, 2, 2, 2)), ((4,), (8,))),
    ("TP 1 to 8", ((4,), (8,)), ((4,), (1,) * 8)),
    ("TP 3 to 2, uneven", ((4,), (3, 3, 2)), ((4,), (4, 4))),
    ("PP 2 TP 2 to TP 4", ((2, 2), (4, 4)), ((4,), (2, 2, 2, 2))),
    ("PP 4 to TP 4", ((1, 1, 1, 1), (8,)), ((4,), (2, 2, 2, 2))),
    ("PP 3 TP 2 to PP 2 TP 4", ((1, 2, 1), (4, 4)), ((2, 2), (2, 2, 2, 2))),
]


@pytest.mark.parametrize(("source", "destination"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
@pytest.mark.parametrize(("source_size", "destination_size", "start"), [(16, 16, 0), (8, 32, 5), (5, 3, 7)])
def test_every_rank_gets_its_own_layers_and_heads_and_no_byte_more(
    context: Any, source: Split, destination: Split, source_size: int, destination_size: int, start: int
) -> None:
    end = 60
    group = Group(context, grid(source_size, *source), grid(destination_size, *destination))
    untouched = [store.data.copy() for store in group.targets]
    pages, dst = range(40, 40 + -(-end // source_size)), range(30, 30 + -(-end // destination_size))
    for receiver in group.receivers:
        group.connect(receiver)
    group.hand_over(start, end, [start, 16, 45, end], pages, dst)
    for sender, geometry in zip(group.senders, group.sources, strict=True):
        assert sum(event.bytes for event in group.loop.of(sender, ChunkAcked)) == (end - start) * geometry.token_bytes
        assert value(sender.statistics(), "bytes_sent_total", ("zmq",)) == (end - start) * geometry.token_bytes
    sent = group.positions(group.stores, group.sources, pages, start, end - start)
    assert np.array_equal(group.positions(group.targets, group.destinations, dst, start, end - start), sent)
    for store, before in zip(group.targets, untouched, strict=True):
        for position in range(start, end):
            page, slot = dst[position // destination_size], position % destination_size
            store.data[page, :, :, :, slot] = before[page, :, :, :, slot]
        assert np.array_equal(store.data, before)
    group.close()


def test_ranks_that_repeat_heads_each_get_them(context: Any) -> None:
    halves = grid(16, [4], [1, 1])
    ranks = [halves[0], halves[0], halves[1], halves[1]]
    group = Group(context, grid(16, [2, 2], [2]), ranks)
    for receiver in group.receivers:
        group.connect(receiver)
    group.hand_over(0, 40, [0, 20, 40], range(3), range(5, 8))
    sent = group.positions(group.stores, group.sources, range(3), 0, 40)
    for pair in ((0, 2), (1, 3)):
        targets, owners = [group.targets[rank] for rank in pair], [ranks[rank] for rank in pair]
        assert np.array_equal(group.positions(targets, owners, range(5, 8), 0, 40), sent)
    group.close()


@pytest.mark.parametrize("backend", [ZMQ, SHM])
def test_senders_between_which_ranks_offer_nothing(context: Any, backend: str) -> None:
    """Four shards of two KV heads: ranks 0 and 2 send, and are 0 and 1 for the peer."""
    group = Group(context, grid(16, [4], [1, 1]), grid(16, [2, 2], [2]), backend=backend, ranks=(0, 2))
    for receiver in group.receivers:
        group.connect(receiver)
    group.hand_over(0, 40, [0, 20, 40], range(3), range(5, 8))
    sent = group.positions(group.stores, group.sources, range(3), 0, 40)
    assert np.array_equal(group.positions(group.targets, group.destinations, range(5, 8), 0, 40), sent)
    for sender, rank in zip(group.senders, (0, 2), strict=True):
        assert {event.stage for event in group.loop.of(sender, ChunkAcked)} == {rank}
    group.close()


def test_a_rank_that_offers_nothing_sends_nothing_and_confirms_cancels(context: Any) -> None:
    [geometry] = grid(16, [4], [2])
    store = random_store(geometry, 8)
    sender = Sender(CONFIG, stage=1, number=1, offers=False, geometry=geometry, store=store, context=context)
    loop = Loop(sender)
    loop.apply(sender, AdmitPeer(seq=0, terms=PeerTerms(session=SESSION, geometries=(geometry,), window_bytes=4096)))
    peer = RawPeer(context, loop, sender.port, stage=1)
    refused = peer.take()[0]
    assert isinstance(refused, Refuse)
    assert refused.code == "no_session"
    loop.apply(
        sender,
        SendChunk(
            seq=0, request=1, after=0, session=SESSION, ticket="t", generation=1, chunk=0, start=0, count=16,
            pages=pack([0]), dst_pages=pack([0]), row=0, dst_row=0,
        ),
    )  # fmt: skip
    loop.apply(sender, CancelSend(seq=0, request=1))
    loop.apply(sender, ReleaseRequest(seq=0, request=1))
    loop.apply(sender, DropPeer(seq=0, session=SESSION))
    assert [(event.stage, event.request) for event in loop.of(sender, SendCancelled)] == [(1, 1)]
    assert not loop.of(sender, SendFailed)
    loop.close()


def test_the_payload_of_two_ranks_is_the_heads_of_the_layers_that_both_own(context: Any) -> None:
    group = Group(context, grid(16, [4], [4]), grid(16, [1, 3], [1, 3]))
    [sender] = group.senders
    peer = RawPeer(context, group.loop, sender.port, peer_stage=3)
    group.send(sender, 0, 4, 20, last=True, pages=range(2, 4), dst=range(2))
    assert isinstance(peer.take()[0], Attached)
    header, (_, *payload) = peer.take()
    assert isinstance(header, Chunk)
    data = group.stores[0].data
    assert payload == [data[2, 1:, :, 1:, 4:].tobytes(), data[3, 1:, :, 1:, :8].tobytes()]
    assert header.payload_bytes == 20 * group.destinations[3].token_bytes
    group.close()


def test_a_rank_without_heads_in_common_is_refused(context: Any) -> None:
    group = Group(context, grid(16, [4], [2, 2]), grid(16, [4], [1, 3]))
    peer = RawPeer(context, group.loop, group.senders[1].port, stage=1, peer_stage=0)
    refused = peer.take()[0]
    assert isinstance(refused, Refuse)
    assert refused.code == "wrong_stage"
    assert refused.message == "stage 1 shares no layers and heads with stage 0 of the peer"
    group.close()
