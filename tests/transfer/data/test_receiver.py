"""A receiver against a prefill stage that repeats, reorders, delays and spoils its chunks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import CancelReceive
from headrace.core.messages.stage_events import ChunkReceived, KvReceived, ReceiveFailed
from headrace.core.types.packed import pack
from headrace.core.types.requests.draft import NO_DRAFT, Draft, DraftTerms, DraftTokens, HiddenStates
from headrace.transfer.protocol import checksum, draft_frame, metadata
from headrace.transfer.protocol.messages import Ack, Nack
from tests.transfer.harness import CONFIG, FIRST, value, zmq_context
from tests.transfer.raw import RawStage


@pytest.fixture
def stage(context: Any) -> Iterator[RawStage]:
    made = RawStage(context)
    yield made
    made.close()


def written(stage: RawStage) -> list[int]:
    """Pages that differ from what they were."""
    return [page for page in range(16) if not np.array_equal(stage.target.data[page], stage.untouched[page])]


def test_repeated_and_reordered_chunks_are_written_once_and_acknowledged_each_time(stage: RawStage) -> None:
    order = [1, 1, 0, 0, 1]
    for number in order:
        stage.send(number)
    assert [stage.answer() for _ in order] == [Ack(ticket="t", generation=1, chunk=number) for number in order]
    assert stage.loop.wait_for(stage.receiver, KvReceived).first == FIRST
    assert len(stage.loop.of(stage.receiver, ChunkReceived)) == 2
    assert value(stage.receiver.statistics(), "stale_messages_total", ("repeated_chunk",)) == 3
    assert (stage.target.data[4] == 1).all()
    assert (stage.target.data[5] == 2).all()
    assert written(stage) == [4, 5]


def test_what_has_come_without_a_gap_is_told_with_each_chunk(stage: RawStage) -> None:
    for number in (1, 0):
        stage.send(number)
        stage.answer()
    stage.loop.wait_for(stage.receiver, KvReceived)
    assert [chunk.until for chunk in stage.loop.of(stage.receiver, ChunkReceived)] == [0, 32]


def test_no_position_is_written_twice(stage: RawStage) -> None:
    """What has come may be read by others already."""
    stage.send(0)
    stage.answer()
    stage.send(1, start=0, pages=pack([4]))
    nack = stage.answer()
    assert isinstance(nack, Nack)
    assert (nack.code, nack.message) == ("bad_chunk", "tokens from 0; those before 16 have come")
    assert (stage.target.data[4] == 1).all()


def test_a_chunk_that_comes_again_after_the_pages_have_a_new_owner_writes_nothing(stage: RawStage) -> None:
    stage.send(0)
    stage.send(1)
    stage.loop.wait_for(stage.receiver, KvReceived)
    stage.target.data[:] = 0xEE
    stage.send(0)
    stage.send(1)
    assert [type(stage.answer()) for _ in range(4)] == [Ack] * 4
    assert (stage.target.data == 0xEE).all()
    assert len(stage.loop.of(stage.receiver, KvReceived)) == 1


def test_another_generation_is_dropped_and_the_right_one_still_arrives(stage: RawStage) -> None:
    stage.send(0, generation=2)
    nack = stage.answer()
    assert isinstance(nack, Nack)
    assert (nack.code, nack.generation) == ("unknown_ticket", 2)
    assert written(stage) == []
    stage.send(0)
    stage.send(1)
    stage.loop.wait_for(stage.receiver, KvReceived)


ROW = metadata.encode("t", 1, FIRST)
FOREIGN_ROW = metadata.encode("other", 1, FIRST)
LATE_ROW = metadata.encode("t", 9, FIRST)


@pytest.mark.parametrize(
    ("number", "frames", "changes", "code"),
    [
        (0, None, {"checksum": 1}, "checksum_mismatch"),
        (0, None, {"checksum": None}, "checksum_mismatch"),
        (0, None, {"pages": pack([5])}, "bad_chunk"),
        (0, None, {"pages": pack([4, 5])}, "bad_chunk"),
        (0, None, {"pages": b""}, "bad_chunk"),
        (0, None, {"start": 16}, "bad_chunk"),
        (1, None, {"start": 32}, "bad_chunk"),
        (1, None, {"count": 17}, "bad_chunk"),
        (0, None, {"count": 2**31 - 1}, "bad_chunk"),
        (0, None, {"count": 0, "payload_bytes": 0, "pages": b""}, "bad_chunk"),
        (0, None, {"row": 4}, "bad_chunk"),
        (0, None, {"payload_bytes": 1}, "bad_chunk"),
        (1, None, {"total": 3}, "bad_chunk"),
        (1, None, {"total": 0}, "bad_chunk"),
        (0, [], {}, "bad_chunk"),
        (0, [b"x"], {}, "bad_chunk"),
        (0, [b"x" * 1024, b""], {}, "bad_chunk"),
        (1, [FOREIGN_ROW, b"\x02" * 1024], {}, "bad_metadata"),
        (1, [LATE_ROW, b"\x02" * 1024], {}, "bad_metadata"),
        (1, [b"\xff" * 256, b"\x02" * 1024], {}, "bad_metadata"),
    ],
)
def test_a_bad_chunk_fails_the_ticket_before_anything_of_it_is_written(
    stage: RawStage, number: int, frames: list[bytes] | None, changes: dict[str, Any], code: str
) -> None:
    """G4. The chunk is refused with a reason; a good copy of it afterwards does not revive the ticket."""
    assert len(stage.page(0)) == 1024
    stage.send(number, frames, **changes)
    nack = stage.answer()
    assert isinstance(nack, Nack)
    assert nack.code == code
    failed = stage.loop.wait_for(stage.receiver, ReceiveFailed)
    assert (failed.request, failed.code, failed.message) == (1, code, nack.message)
    stage.send(0)
    stage.send(1)
    assert [type(stage.answer()) for _ in range(2)] == [Nack, Nack]
    assert written(stage) == []
    assert len(stage.loop.of(stage.receiver, ReceiveFailed)) == 1
    stage.expect(2, generation=2)  # the row is free again
    stage.send(0, generation=2)
    stage.send(1, generation=2)
    assert stage.loop.wait_for(stage.receiver, KvReceived).request == 2


def test_chunks_that_leave_a_gap_fail_the_ticket(stage: RawStage) -> None:
    stage.send(0, [stage.page(1, 8)], count=8, payload_bytes=512)
    stage.send(1)
    assert isinstance(stage.answer(), Ack)
    assert isinstance(stage.answer(), Nack)
    failed = stage.loop.wait_for(stage.receiver, ReceiveFailed)
    assert failed.message == "tokens from 8 were expected next, and a chunk begins at 16"
    assert not stage.loop.of(stage.receiver, KvReceived)


def test_forgetting_is_answered_at_once_and_also_for_what_is_unknown(stage: RawStage) -> None:
    stage.send(0)
    stage.answer()
    for request in (1, 1, 99):
        stage.loop.apply(stage.receiver, CancelReceive(seq=0, request=request))
    stage.target.data[:] = 0xEE
    stage.send(1)
    assert isinstance(stage.answer(), Nack)
    assert (stage.target.data == 0xEE).all()


def test_without_checksums_on_both_sides_chunks_need_none(context: Any) -> None:
    stage = RawStage(context, config=TransferConfig(checksum=False))
    stage.send(0, checksum=None)
    stage.send(1, checksum=None)
    stage.loop.wait_for(stage.receiver, KvReceived)
    stage.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_garbage_is_counted_and_disturbs_nothing(stage: RawStage, frames: list[bytes]) -> None:
    before = value(stage.receiver.statistics(), "malformed_frames_total", ("receiver",))
    stage.socket.send_multipart([stage.route, *frames])
    stage.loop.until(lambda: value(stage.receiver.statistics(), "malformed_frames_total", ("receiver",)) == before + 1)
    assert not stage.loop.of(stage.receiver, ReceiveFailed)


def test_a_truncated_header_is_counted(stage: RawStage) -> None:
    header, frames = stage.chunk(0)
    data = checksum.of_frames(frames).to_bytes(8, "little")
    stage.socket.send_multipart([stage.route, data, *frames])
    stage.loop.until(lambda: value(stage.receiver.statistics(), "malformed_frames_total", ("receiver",)) == 1)
    stage.say(header, *frames)
    assert isinstance(stage.answer(), Ack)


def test_a_silent_stage_is_attached_to_again() -> None:
    with zmq_context() as context:
        stage = RawStage(context, config=TransferConfig(peer_timeout_s=CONFIG.peer_timeout_s))
        seen: list[bytes] = []

        def attached_again() -> bool:
            while stage.socket.poll(0):
                seen.append(stage.socket.recv_multipart()[1])
            return any(b"Attach" in body for body in seen)

        stage.loop.until(attached_again)  # its pings go unanswered
        stage.close()


BOTH = DraftTerms(hidden=True, top_k=2)
STATE = HiddenStates(31, 2, "float16", b"abcd")
DRAFT = Draft(STATE, DraftTokens((5, 6), (0.5, 0.25)))


def asking(context: Any, terms: DraftTerms) -> RawStage:
    """A stage whose peer expects request 2, of generation 2, with draft data."""
    made = RawStage(context)
    made.loop.apply(made.receiver, CancelReceive(seq=0, request=1))
    made.expect(2, generation=2, draft=terms)
    return made


def send_draft(stage: RawStage, frame: bytes, **changes: Any) -> None:
    frames = [metadata.encode("t", 2, FIRST), frame, stage.page(2)]
    stage.send(1, frames, **{"generation": 2, "draft_bytes": len(frame)} | changes)


def test_a_draft_frame_comes_with_the_first_token(context: Any) -> None:
    stage = asking(context, BOTH)
    stage.send(0, generation=2)
    send_draft(stage, draft_frame.encode("t", 2, DRAFT))
    assert [type(stage.answer()) for _ in range(2)] == [Ack, Ack]
    assert stage.loop.wait_for(stage.receiver, KvReceived).first.draft == DRAFT
    stage.close()


def test_no_draft_frame_is_no_error(context: Any) -> None:
    stage = asking(context, BOTH)
    stage.send(0, generation=2)
    stage.send(1, generation=2)
    assert stage.loop.wait_for(stage.receiver, KvReceived).first == FIRST
    stage.close()


@pytest.mark.parametrize(
    ("terms", "frame", "changes", "code"),
    [
        (NO_DRAFT, draft_frame.encode("t", 2, DRAFT), {}, "bad_chunk"),
        (BOTH, draft_frame.encode("t", 2, DRAFT), {"draft_bytes": 1}, "bad_chunk"),
        (BOTH, draft_frame.encode("t", 2, DRAFT), {"draft_bytes": 0}, "bad_chunk"),
        (BOTH, draft_frame.encode("t", 2, DRAFT), {"checksum": 1}, "checksum_mismatch"),
        (BOTH, bytes((1 << 20) + 1), {}, "bad_chunk"),
        (BOTH, b"\xff" * 56, {}, "bad_metadata"),
        (BOTH, draft_frame.encode("t", 1, DRAFT), {}, "bad_metadata"),
        (BOTH, draft_frame.encode("other", 2, DRAFT), {}, "bad_metadata"),
        (BOTH, draft_frame.encode("t", 2, Draft(HiddenStates(30, 2, "float16", b"abcd"))), {}, "bad_metadata"),
        (DraftTerms(top_k=2), draft_frame.encode("t", 2, DRAFT), {}, "bad_metadata"),
        (DraftTerms(hidden=True, top_k=1), draft_frame.encode("t", 2, DRAFT), {}, "bad_metadata"),
    ],
)
def test_a_bad_draft_frame_fails_the_ticket_before_anything_of_its_chunk_is_written(
    context: Any, terms: DraftTerms, frame: bytes, changes: dict[str, Any], code: str
) -> None:
    stage = asking(context, terms)
    send_draft(stage, frame, **changes)
    nack = stage.answer()
    assert isinstance(nack, Nack)
    assert nack.code == code
    assert written(stage) == []
    assert stage.loop.wait_for(stage.receiver, ReceiveFailed).code == code
    stage.close()
