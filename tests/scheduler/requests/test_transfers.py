"""The states of a transfer: which moves are legal, and when the prefill server may write into our pages."""

import pytest

from headrace.core.incoming import IncomingState, IncomingTransfer, RemoteWriter
from headrace.core.types.packed import pack, unpack
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.requests.transfers import OutgoingTransfer


def incoming(writer: RemoteWriter = RemoteWriter.IDLE) -> IncomingTransfer:
    wanted = Reservation(ticket="t", generation=1, prompt_tokens=3, cached_tokens=0, pages=pack([4, 5, 6]), row=0)
    return IncomingTransfer("s", wanted, unready={0}, missing={0}, until={0: 0}, writer=writer)


def outgoing(cached: int = 0) -> OutgoingTransfer:
    return OutgoingTransfer("s", "t", 1, unpack(pack(range(50, 60))), 4, 7, cached_tokens=cached, sent=cached)


def test_a_prefill_server_writes_from_the_reservation_until_all_has_arrived() -> None:
    transfer = incoming()
    assert not transfer.remote_writes
    transfer.reserve()
    assert (transfer.state, transfer.remote_writes) == (IncomingState.RESERVED, True)
    transfer.receive()
    assert (transfer.state, transfer.writer) == (IncomingState.RECEIVED, RemoteWriter.STOPPED)


def test_a_lost_session_does_not_stop_a_prefill_server_that_writes_by_itself() -> None:
    transfer = incoming()
    transfer.reserve()
    transfer.lose()
    assert (transfer.state, transfer.remote_writes) == (IncomingState.ENDED, True)
    transfer.stop_writer()
    assert not transfer.remote_writes


def test_an_ended_ticket_stops_the_prefill_server() -> None:
    transfer = incoming()
    transfer.reserve()
    transfer.end()
    assert (transfer.state, transfer.remote_writes) == (IncomingState.ENDED, False)


def test_a_prefill_server_that_sends_messages_never_writes_by_itself() -> None:
    transfer = incoming(RemoteWriter.NONE)
    transfer.reserve()
    assert not transfer.remote_writes
    transfer.receive()
    assert transfer.writer is RemoteWriter.NONE


def test_moves_that_do_not_exist_are_errors() -> None:
    with pytest.raises(ValueError, match="is preparing, not reserved"):
        incoming().receive()
    transfer = incoming()
    transfer.reserve()
    with pytest.raises(ValueError, match="is reserved, not preparing"):
        transfer.reserve()
    transfer.end()
    with pytest.raises(ValueError, match="is ended, not reserved"):
        transfer.receive()


def test_chunks_are_acknowledged_once_by_each_stage() -> None:
    transfer = outgoing()
    transfer.add_chunk(8, range(2))
    transfer.last_ordered = True
    assert transfer.ack(0, 1, 100, 5.0)
    assert not transfer.ack(0, 1, 100, 6.0), "it has acknowledged it"
    assert not transfer.ack(1, 0, 100, 6.0), "no such chunk"
    assert not transfer.acknowledged
    assert transfer.ack(0, 0, 100, 7.0)
    assert (transfer.acknowledged, transfer.bytes, transfer.silent_since) == (True, 200, 7.0)


def test_a_peer_is_awaited_only_for_chunks_that_stages_have_reached() -> None:
    transfer = outgoing()
    transfer.add_chunk(4, range(1))
    transfer.add_chunk(8, range(1))
    assert not transfer.awaits_ack
    transfer.reach(0, 3.0)
    assert (transfer.awaits_ack, transfer.silent_since) == (True, 3.0)
    transfer.reach(1, 4.0)
    assert transfer.silent_since == 3.0, "it is silent about the first one since then"
    transfer.ack(0, 0, 1, 5.0)
    assert transfer.awaits_ack
    transfer.ack(1, 0, 1, 6.0)
    assert not transfer.awaits_ack


def test_the_peers_pages_of_a_chunk_begin_with_the_one_of_its_first_position() -> None:
    transfer = outgoing(cached=6)
    assert list(transfer.dst_pages_until(10)) == [50, 51], "page 50 holds position 6"
    transfer.add_chunk(10, range(1))
    assert list(transfer.dst_pages_until(13)) == [51, 52]
