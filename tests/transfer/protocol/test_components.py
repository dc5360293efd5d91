"""Draft model KV and MLA latents beside keys and values, over real sockets, split otherwise on the two sides."""

from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.messages.stage_events import ChunkAcked, ReceiveFailed
from headrace.core.types.kv.backends import SHM, ZMQ
from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.transfer.backends.writer_locks import host_token
from headrace.transfer.protocol import checksum
from headrace.transfer.protocol.messages import Ack, Attached, Chunk, Nack, Refuse
from tests.transfer.group import PAGES, Group
from tests.transfer.harness import value
from tests.transfer.layouts import random_layout
from tests.transfer.ranks import grid
from tests.transfer.raw import RawPeer, RawStage

DRAFT = Component("draft", "float32", layers=2, kv_heads=4, head_dim=3)
LATENT = Component("latent", "float16", layers=4, kv_heads=1, head_dim=5, planes=1)


def draft(layer: int, layers: int, head: int, heads: int) -> Component:
    return replace(DRAFT, layer_start=layer, layers=layers, head_start=head, kv_heads=heads)


def latent(layer: int, layers: int) -> Component:
    return replace(LATENT, layer_start=layer, layers=layers)


def side(ranks: list[Geometry], *components: tuple[Component, ...]) -> list[Geometry]:
    return [replace(rank, components=parts) for rank, parts in zip(ranks, components, strict=True)]


def one_rank(size: int) -> list[Geometry]:
    return side(grid(size, [4], [4]), (DRAFT, LATENT))


def pp2_tp2(size: int) -> list[Geometry]:
    """The draft model on the last pipeline rank; each tensor rank names the latents of half of its layers."""
    return side(
        grid(size, [2, 2], [2, 2]),
        (latent(0, 1),),
        (latent(1, 1),),
        (latent(2, 1), draft(0, 2, 0, 2)),
        (draft(0, 2, 2, 2), latent(3, 1)),
    )


def tp4(size: int) -> list[Geometry]:
    """Every rank of a peer has all latents."""
    return side(grid(size, [4], [1, 1, 1, 1]), *((LATENT, draft(0, 2, head, 1)) for head in range(4)))


def pp3_apart(size: int) -> list[Geometry]:
    """The draft model on a rank of its own, by layers and heads that no other tensor is split by."""
    bare = Geometry("float16", layers=0, kv_heads=0, head_dim=4, page_size=size)
    ranks = [*grid(size, [1, 2, 1], [4]), bare, bare]
    return side(ranks, (latent(0, 3),), (), (latent(3, 1),), (draft(0, 2, 0, 1),), (draft(0, 2, 1, 3),))


PAIRS = [
    ("one to one", one_rank, one_rank),
    ("PP 2 TP 2 to one", pp2_tp2, one_rank),
    ("one to TP 4", one_rank, tp4),
    ("PP 2 TP 2 to TP 4", pp2_tp2, tp4),
    ("PP 3 and apart to PP 2 TP 2", pp3_apart, pp2_tp2),
    ("PP 2 TP 2 to PP 3 and apart", pp2_tp2, pp3_apart),
]


@pytest.mark.parametrize("backend", [ZMQ, pytest.param(SHM, marks=pytest.mark.skipif(not host_token(), reason="shm"))])
@pytest.mark.parametrize(("source", "destination"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
@pytest.mark.parametrize(("source_size", "destination_size", "start"), [(16, 16, 0), (8, 32, 5), (5, 3, 7)])
def test_components_come_with_the_pages_of_their_tokens_and_no_byte_more(
    context: Any, backend: str, source: Any, destination: Any, source_size: int, destination_size: int, start: int
) -> None:
    """The peer's pools are laid out at random: K and V, heads, slots, layers and pages in any order."""
    end, random = 60, Random(source_size + start)
    destinations = destination(destination_size)
    layouts = [random_layout(rank, PAGES, random) for rank in destinations]
    group = Group(context, source(source_size), destinations, backend=backend, layouts=layouts)
    untouched = [{name: data.copy() for name, data in store.tensors.items()} for store in group.targets]
    pages, dst = range(40, 40 + -(-end // source_size)), range(30, 30 + -(-end // destination_size))
    for receiver in group.receivers:
        group.connect(receiver)
    group.hand_over(start, end, [start, 16, 45, end], pages, dst)
    moved = sum(event.bytes for sender in group.senders for event in group.loop.of(sender, ChunkAcked))
    assert moved == (end - start) * sum(rank.token_bytes for rank in destinations)
    assert sum(value(sender.statistics(), "bytes_sent_total", (backend,)) for sender in group.senders) == moved
    for name in (KV, "draft", "latent"):
        sent = group.positions(group.stores, group.sources, pages, start, end - start, name)
        assert np.array_equal(group.positions(group.targets, destinations, dst, start, end - start, name), sent)
    wanted = group.positions(group.stores, group.sources, pages, start, end - start, "latent")
    for store, rank, before in zip(group.targets, destinations, untouched, strict=True):
        for part in (one for one in rank.tensors if one.name == "latent"):  # each of those that all have it
            layers = slice(part.layer_start, part.layer_end)
            found = [
                store.tensors["latent"][dst[p // destination_size], :, :, :, p % destination_size]
                for p in range(start, end)
            ]
            assert np.array_equal(np.stack(found), wanted[:, layers])
        for name, data in store.tensors.items():
            for position in range(start, end):
                page, slot = dst[position // destination_size], position % destination_size
                data[page, :, :, :, slot] = before[name][page, :, :, :, slot]
            assert np.array_equal(data, before[name])
    group.close()


def test_the_frames_of_keys_and_values_come_first_and_then_those_of_each_component(context: Any) -> None:
    group = Group(context, one_rank(16), tp4(16))
    [sender] = group.senders
    peer = RawPeer(context, group.loop, sender.port, peer_stage=2)
    group.send(sender, 0, 4, 20, last=True, pages=range(2, 4), dst=range(2))
    assert isinstance(peer.take()[0], Attached)
    header, (row, *payload) = peer.take()
    assert isinstance(header, Chunk)
    kv, draft, latent = (group.stores[0].tensors[name] for name in (KV, "draft", "latent"))
    mine = [(kv, slice(2, 3)), (draft, slice(2, 3)), (latent, slice(0, 1))]
    assert payload == [
        data[page, :, :, heads, slots].tobytes()
        for data, heads in mine
        for page, slots in ((2, slice(4, 16)), (3, slice(0, 8)))
    ]
    assert header.payload_bytes == sum(map(len, payload)) == 20 * group.destinations[2].token_bytes
    assert header.checksum == checksum.of_frames([row, *payload])
    group.close()


def test_stages_that_share_a_component_alone_are_joined_and_others_are_not(context: Any) -> None:
    group = Group(context, pp3_apart(16), pp2_tp2(16))
    apart, last = group.senders[3], group.senders[2]
    peer = RawPeer(context, group.loop, apart.port, stage=3, peer_stage=2)
    assert isinstance(peer.take()[0], Attached)
    group.send(apart, 0, 0, 16, last=True, pages=range(1), dst=range(1))
    _, (_, *payload) = peer.take()
    assert payload == [group.stores[3].tensors["draft"][0].tobytes()]
    for sender, stage, peer_stage in ((apart, 3, 0), (apart, 3, 1), (last, 2, 0)):
        refused = RawPeer(context, group.loop, sender.port, stage=stage, peer_stage=peer_stage).take()[0]
        assert isinstance(refused, Refuse)
        assert refused.code == "wrong_stage"
    group.close()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda frames: frames[:1], "bad_chunk"),
        (lambda frames: [frames[1], frames[0]], "bad_chunk"),
        (lambda frames: [frames[0] + frames[1]], "bad_chunk"),
        (lambda frames: [frames[0], b"?" + frames[1][1:]], "checksum_mismatch"),
        (lambda frames: frames, ""),
    ],
    ids=["without the component", "in another order", "in one frame", "with a wrong byte", "as it should be"],
)
def test_a_chunk_is_refused_before_a_byte_is_written_unless_its_components_are_right(
    context: Any, spoil: Any, code: str
) -> None:
    stage = RawStage(context, components=(LATENT,))
    kv = stage.page(1)
    extra = bytes(range(160)) * 4  # 16 tokens of 4 layers of 5 float16
    sound = [kv, extra]
    found = checksum.of_frames(sound)
    stage.send(0, spoil(sound), payload_bytes=len(kv) + len(extra), checksum=found)
    answer = stage.answer()
    if code:
        assert isinstance(answer, Nack)
        assert answer.code == code
        assert stage.loop.of(stage.receiver, ReceiveFailed)[0].code == code
        assert np.array_equal(stage.target.data, stage.untouched)
        assert np.array_equal(stage.target.tensors["latent"], stage.untouched_components["latent"])
    else:
        assert isinstance(answer, Ack)
        assert stage.target.tensors["latent"][4].tobytes() == extra
    stage.close()
