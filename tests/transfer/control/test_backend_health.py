"""A way of moving KV that failed towards a peer is avoided for a while, if there is another, and tried again later."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.messages.peers import EndPeer, PeerJoined
from headrace.core.types.kv.backends import NIXL, ZMQ, NixlMemory, PoolMemory
from headrace.transfer.control.backend_health import FIRST_PAUSE_S, LONGEST_PAUSE_S, REMEMBERED, BackendHealth
from headrace.transfer.control.session_table import SessionTable
from headrace.transfer.protocol.messages import Hello, Welcome
from tests.transfer.control.session_table import OFFER, book, hello

FAST = replace(OFFER, backends=(NIXL, ZMQ), nixl=frozenset({"1"}))


def by_nixl(*backends: str, name: str = "decode") -> Hello:
    pool = NixlMemory(version="1", bytes=1, pages=100, strides=(1, 1, 1, 1, 1))
    return hello(backends=backends, memory=(PoolMemory(nixl=pool),), name=name)


def meet(made: SessionTable, now: float, *backends: str, name: str = "decode") -> PeerJoined:
    """A new session of a peer, on a new connection."""
    said = by_nixl(*(backends or (NIXL, ZMQ)), name=name)
    outcome = made.receive(f"{name} {now}".encode(), replace(said, instance=f"{hash((name, now)):032x}"[-32:]), now)
    (joined,) = [event for event in outcome.events if isinstance(event, PeerJoined)]
    assert [message.backend for _, message in outcome.replies if isinstance(message, Welcome)] == [joined.terms.backend]
    return joined


def fail(made: SessionTable, joined: PeerJoined, now: float, *, backend_failed: bool = True) -> None:
    made.tell(EndPeer(session=joined.session, reason="stage 0: NIXL: error", backend_failed=backend_failed), now)


def test_the_next_session_takes_another_way_and_a_later_one_the_first_again() -> None:
    made = book(offer=FAST)
    first = meet(made, 0.0)
    assert first.terms.backend == NIXL
    fail(made, first, 1.0)
    second = meet(made, 2.0)
    assert second.terms.backend == ZMQ
    assert "not nixl: it failed 1 times in a row, and is tried again in 29 s" in second.backend_reason
    fail(made, second, 3.0, backend_failed=False)
    assert meet(made, 1.0 + FIRST_PAUSE_S).terms.backend == NIXL


def test_other_peers_keep_their_way() -> None:
    made = book(offer=FAST)
    fail(made, meet(made, 0.0), 1.0)
    assert meet(made, 2.0, name="other").terms.backend == NIXL


def test_the_only_way_is_taken_although_it_failed() -> None:
    made = book(offer=FAST)
    fail(made, meet(made, 0.0, NIXL), 1.0)
    again = meet(made, 2.0, NIXL)
    assert again.terms.backend == NIXL
    assert "it failed 1 times" in again.backend_reason


def test_a_session_that_ends_for_another_reason_changes_nothing() -> None:
    made = book(offer=FAST)
    fail(made, meet(made, 0.0), 1.0, backend_failed=False)
    assert meet(made, 2.0).terms.backend == NIXL


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=40))
def test_pauses_double_up_to_an_hour_and_begin_anew_after_one_that_was_quiet(waits: list[float]) -> None:
    health, now, pause = BackendHealth(), 0.0, FIRST_PAUSE_S
    for wait in waits:
        health.failed("p", NIXL, now)
        assert NIXL in health.avoided("p", (NIXL, ZMQ), now + 0.99 * pause)
        assert health.avoided("p", (NIXL, ZMQ), now + 1.01 * pause) == {}
        now += pause + wait
        pause = min(2 * pause, LONGEST_PAUSE_S)
    now += LONGEST_PAUSE_S + 1
    health.failed("p", NIXL, now)
    assert health.avoided("p", (NIXL,), now + 1.01 * FIRST_PAUSE_S) == {}


def test_peers_that_fail_are_forgotten_in_the_end() -> None:
    health = BackendHealth()
    for number in range(REMEMBERED + 1):
        health.failed(str(number), NIXL, 0.0)
    assert health.avoided("0", (NIXL,), 1.0) == {}
    assert NIXL in health.avoided("1", (NIXL,), 1.0)
