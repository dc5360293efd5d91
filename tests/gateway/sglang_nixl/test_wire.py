"""Messages of SGLang decode ranks, whole, older and damaged ones; and what is answered."""

import random
import struct

import pytest

from headrace.gateway.sglang_nixl.wire import (
    Abort,
    Address,
    Registration,
    RoomTarget,
    abort_ack,
    kv_status,
    parse,
)
from tests.gateway.sglang_nixl import decode_frames

HERE = Address("127.0.0.1", 7001)


def registered(frames: list[bytes]) -> Registration:
    message = parse(frames)
    assert isinstance(message, Registration)
    return message


def target(frames: list[bytes]) -> RoomTarget:
    message = parse(frames)
    assert isinstance(message, RoomTarget)
    return message


def test_a_registration() -> None:
    frames = decode_frames.registration(tp_size=2, tp_rank=1, gpu=3, kind="VRAM")
    assert len(frames) == 25, "as many as SGLang 0.5.23 sends"
    assert registered(frames) == Registration(
        address=HERE,
        agent="agent-1",
        agent_metadata=b"blob",
        kv_addresses=(1000, 1001, 1002, 1003, 1004, 1005),
        aux_addresses=tuple(range(2000, 2010)),
        gpu=3,
        tp_size=2,
        tp_rank=1,
        page_bytes=(2048,) * 6,
        pages=100,
        memory_kinds=("VRAM",) * 6,
    )


def test_frames_that_an_older_engine_does_not_send_have_defaults_and_those_of_a_newer_one_are_left_alone() -> None:
    frames = decode_frames.registration()
    old = registered(frames[:15])
    assert (old.pages, old.memory_kinds, old.page_bytes, old.dcp_size) == (None, (), (2048,) * 6, 1)
    assert registered([*frames, b"of a later release"]) == registered(frames)
    with pytest.raises(ValueError, match="14 frames"):
        parse(frames[:14])
    frames = decode_frames.room(7, [4, 5], prefix=32)
    assert target(frames[:8]).prefix == 0
    assert target([*frames, b"more"]) == target(frames)
    with pytest.raises(ValueError, match="7 frames"):
        parse(frames[:7])


def test_states_besides_keys_and_values_are_seen() -> None:
    some = struct.pack("<2I", 1, 16) + struct.pack("<2Q", 1, 2)  # one list of two addresses
    assert registered(decode_frames.registration(states=some)).has_states
    assert not registered(decode_frames.registration(states=struct.pack("<2I", 1, 0))).has_states


def test_the_pages_of_a_room() -> None:
    frames = decode_frames.room(1 << 62, [4, 5, 9], aux_index=6, ranks=2, prefix=32)
    assert len(frames) == 11
    expected = RoomTarget(room=1 << 62, address=HERE, agent="agent-1", pages=(4, 5, 9), aux_index=6, ranks=2, prefix=32)
    assert target(frames) == expected
    assert target(decode_frames.room(7, [], dummy=True)).dummy
    assert not target(decode_frames.room(7, [], prefix=32)).dummy, "the engine has it all, and wants the first token"
    assert target(decode_frames.room(7, [])[:10]).dummy, "an older engine says so by naming no pages"
    assert not target(decode_frames.room(7, [], prefix=32)[:10]).dummy


def test_aborts_with_and_without_a_generation() -> None:
    assert parse(decode_frames.abort(7, generation=3)) == Abort(room=7, address=HERE, generation=3)
    assert parse(decode_frames.abort(7, generation=None)) == Abort(room=7, address=HERE)
    assert parse([b"ABORT", b"7"]) == Abort(room=7)


def test_answers_byte_by_byte() -> None:
    assert kv_status(77, None) == [b"KV_STATUS", b"77", b"4", b"0", b""]
    assert kv_status(77, "gone") == [b"KV_STATUS", b"77", b"0", b"0", b"gone"]
    assert abort_ack(77, 3) == [b"ABORT_ACK", b"77", b"0", b"3"]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "without frames"),
        ([b"BOOTSTRAP", b"7", b"127.0.0.1", b"1"], "begins with b'BOOTSTRAP'"),
        ([b"GET / HTTP/1.1"], "begins with"),
        ([b"ABORT"], "without a room"),
        (decode_frames.room(1 << 63, [1]), "the largest is"),
        (decode_frames.room(7, [-1]), "page -1"),
        (decode_frames.room(7, [1], host="inproc://x"), "does not appear to be an IPv4 or IPv6 address"),
        (decode_frames.room(7, [1], port=0), "port 0"),
        ([*decode_frames.room(7, [1])[:5], b"123", b"0", b"1"], "no list of integers of 4 bytes"),
    ],
)
def test_other_messages_are_refused(frames: list[bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(frames)


def test_damaged_messages_are_refused_by_no_other_error() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(3000):
        frames = rng.choice(
            (decode_frames.registration, lambda: decode_frames.room(7, [1, 2]), lambda: decode_frames.abort(7))
        )()
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(frames))
            frames[at] = rng.choice(
                (b"", rng.randbytes(rng.randrange(40)), frames[at][:-1], frames[rng.randrange(len(frames))])
            )
        try:
            parse(frames)
        except ValueError:
            refused += 1
    assert refused > 1000
