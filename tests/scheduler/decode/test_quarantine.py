"""Pages that a prefill server writes into directly: when they are free again, and what a failed engine tells peers."""

import pytest

from headrace.core.messages.orders import CloseSession, DropPeer, OpenSession, PrepareReceive, ReleaseRequest, SendChunk
from headrace.core.messages.peers import (
    AskCancel,
    EndPeer,
    PeerEvent,
    PeerGone,
    PeerJoined,
    PrefillDown,
    PrefillUp,
    TellFailed,
    TicketCancelled,
    TicketFailed,
)
from headrace.core.messages.replies import RequestFailed, StageDown
from headrace.core.messages.stage_events import KvReceived, PeerLost, SessionClosed, StageFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import NIXL, SHM, ZMQ
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.core.types.requests.request import FirstToken, SendTo
from tests.scheduler.bench import Bench, geometry, none, only
from tests.scheduler.decode.test_fetch import fetch


def direct(stages: int = 1) -> tuple[Bench, PrepareReceive]:
    """A decode server whose prefill server has been asked to write into pages of request "a"."""
    bench = Bench(True, stages=stages)
    bench.prefill_up()
    bench.do(up("p2"))
    assert bench.last(OpenSession).terms.backend == SHM
    fetch(bench)
    expect = bench.last(PrepareReceive)
    for stage in range(stages):
        bench.expecting(expect.request, stage)
    return bench, expect


def peer_terms(session: str, backend: str) -> PeerTerms:
    return PeerTerms(session=session, geometries=(geometry(),), window_bytes=1 << 20, backend=backend)


def up(session: str) -> PrefillUp:
    return PrefillUp(
        name="p",
        terms=PrefillTerms(
            session=session, endpoints=("tcp://x:2",), geometries=(geometry(),), window_bytes=1 << 20, backend=SHM
        ),
    )


NAMES = {"session": "p2", "ticket": "t", "generation": 1}
FAILED = ErrorInfo(code="stage_failed", message="", status=503)


@pytest.mark.parametrize("answer", [TicketCancelled(**NAMES), TicketFailed(**NAMES, error=FAILED)])  # type: ignore[arg-type]
def test_pages_of_a_cancelled_request_are_kept_until_the_prefill_server_answers(answer: PeerEvent) -> None:
    bench, expect = direct()
    only(bench.abort(), AskCancel)
    assert none(bench.forgotten(expect.request), ReleaseRequest), "our stage has ceased, the other side has not said so"
    assert bench.metric("quarantined_pages") == 3
    only(bench.do(answer), ReleaseRequest)  # type: ignore[arg-type]
    assert bench.metric("quarantined_pages") == 0
    bench.assert_empty()


def test_the_prefill_server_may_answer_before_our_own_stages() -> None:
    bench, expect = direct(stages=2)
    bench.abort()
    assert none(bench.do(TicketCancelled(**NAMES)), ReleaseRequest)  # type: ignore[arg-type]
    assert none(bench.forgotten(expect.request, 0), ReleaseRequest)
    only(bench.forgotten(expect.request, 1), ReleaseRequest)


def test_after_a_lost_session_pages_are_kept_until_every_stage_has_closed_it() -> None:
    bench, expect = direct(stages=2)
    only(bench.do(PrefillDown(name="p", session="p2", reason="silent")), CloseSession)
    for stage in (0, 1):
        assert none(bench.forgotten(expect.request, stage), ReleaseRequest)
    effects = bench.wait(100_000.0)  # it may be stopped for a day, and no stage of ours is to blame
    assert none(effects, ReleaseRequest)
    assert none(effects, StageDown)
    bench.do(up("p3"))  # meanwhile another session begins, and its pages are others
    fetch(bench, "b", ticket="u")
    assert not set(bench.last(PrepareReceive).pages[::4]) & set(expect.pages[::4])
    assert none(bench.do(SessionClosed(stage=0, session="p2")), ReleaseRequest)
    assert none(bench.do(SessionClosed(stage=0, session="p2")), ReleaseRequest)
    assert none(bench.do(SessionClosed(stage=1, session="other")), ReleaseRequest)
    assert only(bench.do(SessionClosed(stage=1, session="p2")), ReleaseRequest).request == expect.request
    assert bench.metric("quarantined_pages") == 0


def test_pages_without_a_reservation_or_with_all_kv_here_are_not_quarantined() -> None:
    bench = Bench(True)
    bench.prefill_up()
    bench.do(up("p2"))
    fetch(bench)
    bench.abort()
    only(bench.forgotten(bench.last(PrepareReceive).request), ReleaseRequest)
    bench, expect = direct()
    bench.do(KvReceived(stage=0, request=expect.request, first=FirstToken(42, 10, 0), bytes=1, chunks=1))
    assert bench.metric("quarantined_pages") == 0
    bench.abort()
    assert none(bench.seen, AskCancel)


def test_a_failed_engine_ends_the_quarantine_of_its_pages() -> None:
    bench, expect = direct()
    bench.abort()
    bench.forgotten(expect.request)
    assert bench.metric("quarantined_pages") == 3
    bench.do(StageFailed(stage=0, message="killed"))
    assert bench.metric("quarantined_pages") == 0
    assert bench.scheduler.idle
    assert bench.do(SessionClosed(stage=0, session="p2")) == []


def test_a_failed_stage_ends_the_sessions_of_peers_that_are_written_to_directly() -> None:
    """Another stage may still be writing: the session ends, and the peer revokes the access itself."""
    bench = Bench()
    for session, backend in (("direct", SHM), ("framed", ZMQ)):
        bench.do(PeerJoined(name="d", terms=peer_terms(session, backend)))
    effects = bench.do(StageFailed(stage=0, message="killed"))
    assert only(effects, EndPeer).session == "direct"
    assert none(effects[: effects.index(only(effects, EndPeer))], TellFailed), "it ends before anything else is said"


def test_a_lost_write_ends_the_session_and_sends_the_peer_nothing_else() -> None:
    """Bytes may still come to its pages, so it is told nothing about its tickets. Other peers are not affected."""
    bench = Bench()
    bench.do(PeerJoined(name="d", terms=peer_terms("s", NIXL)))
    bench.do(PeerJoined(name="e", terms=peer_terms("other", NIXL)))
    bench.submit("a", 10, route=SendTo("t"))
    bench.reserve("t", 10)
    bench.compute(1)
    send = bench.one(SendChunk)
    effects = bench.do(PeerLost(stage=0, session="s", reason="NIXL: reset"))
    assert effects == [EndPeer(session="s", reason="stage 0: NIXL: reset", backend_failed=True)]
    effects = bench.do(PeerGone(session="s", reason="stage 0: NIXL: reset"))
    assert only(effects, DropPeer).session == "s"
    assert only(effects, RequestFailed).error.code == "peer_gone"
    assert none([*effects, *bench.quiet(send.request)], EndPeer)
    bench.assert_empty()
