"""Functions that run in forked children."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest

from headrace.core.runtime import forked
from headrace.core.runtime.forked import Forked, ForkFailed

LIMIT_S = 30.0


def outcome(child: Forked) -> bytes:
    """The child's result; its descriptor says when to ask, as a loop would."""
    deadline = time.monotonic() + LIMIT_S
    while (found := child.result()) is None:
        assert time.monotonic() < deadline
        select.select([child], [], [], 1.0)
    return found


def process_of(function: Callable[[], bytes], limit_s: float = LIMIT_S) -> tuple[Forked, int]:
    """A child, and its process id."""
    child = Forked(function, limit_s)
    return child, child._process


def is_gone(process: int) -> bool:
    """Whether it ends, and is reaped, within seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not os.path.exists(f"/proc/{process}"):
            return True
        time.sleep(0.01)
    return False


def test_child_sees_the_state_as_it_was_and_changes_only_its_own() -> None:
    state = {"queued": 3}
    may_go, go = os.pipe()

    def function() -> bytes:
        state["queued"] += 1
        return b"%d" % state["queued"]

    child, process = process_of(function)
    state["queued"] = 100
    assert outcome(child) == b"4"
    assert state["queued"] == 100
    assert child.result() == b"4"  # as often as it is asked
    child.close()
    child.close()
    assert is_gone(process)
    os.close(may_go)
    os.close(go)


def test_empty_result_is_a_result() -> None:
    child, process = process_of(lambda: b"")
    assert outcome(child) == b""
    child.close()
    assert is_gone(process)


def test_exception_is_told_with_its_place() -> None:
    def function() -> bytes:
        raise ValueError("no such page")

    child, process = process_of(function)
    with pytest.raises(ForkFailed, match=r"(?s)a forked child has failed: .*in function.*ValueError: no such page"):
        outcome(child)
    with pytest.raises(ForkFailed):
        child.result()
    child.close()
    assert is_gone(process)


def test_exit_of_the_function_ends_the_child_alone() -> None:
    child, process = process_of(lambda: exit(3))
    with pytest.raises(ForkFailed, match="SystemExit"):
        outcome(child)
    child.close()
    assert is_gone(process)


def test_child_that_takes_too_long_ends_itself() -> None:
    child, process = process_of(lambda: bytes(threading.Event().wait()), limit_s=0.2)
    with pytest.raises(ForkFailed, match=r"was killed, or took longer than 0\.2 s"):
        outcome(child)
    child.close()
    assert is_gone(process)


def test_child_that_is_stopped_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_GRACE_S", 0.0)
    child, process = process_of(lambda: bytes(threading.Event().wait()), limit_s=0.3)
    os.kill(process, signal.SIGSTOP)
    time.sleep(0.35)
    with pytest.raises(ForkFailed, match=r"took longer than 0\.3 s"):
        child.result()
    child.close()
    assert is_gone(process)


def test_killed_child_has_no_result() -> None:
    child, process = process_of(lambda: bytes(threading.Event().wait()))
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ForkFailed, match="was killed"):
        outcome(child)
    child.close()
    assert is_gone(process)


def test_child_that_is_not_wanted_any_more_is_killed() -> None:
    child, process = process_of(lambda: bytes(threading.Event().wait()))
    assert child.result() is None
    child.close()
    assert is_gone(process)


def test_huge_result_comes_in_pieces() -> None:
    size = 20 << 20
    child, process = process_of(lambda: b"k" * size)
    deadline, longest_s, calls, found = time.monotonic() + LIMIT_S, 0.0, 0, None
    while found is None and time.monotonic() < deadline:
        select.select([child], [], [], 1.0)
        received, began = len(child._received), time.thread_time()
        found = child.result()
        calls, longest_s = calls + 1, max(longest_s, time.thread_time() - began)
        assert len(child._received) - received <= forked._PIECES * forked._PIECE_BYTES
    assert found == b"k" * size
    assert calls >= 20
    assert longest_s < 0.25
    child.close()
    assert is_gone(process)


def test_result_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MAX_RESULT_BYTES", 1 << 20)
    child, process = process_of(lambda: bytes(2 << 20))
    with pytest.raises(ForkFailed, match="more than 1 MiB"):
        outcome(child)
    child.close()
    assert is_gone(process)


def test_connections_of_the_parent_are_not_kept_open_by_a_child() -> None:
    ours, peer = socket.socketpair()
    child, _ = process_of(lambda: bytes(threading.Event().wait()))
    time.sleep(0.05)
    ours.close()
    peer.settimeout(10)
    assert peer.recv(1) == b""  # although the child lives
    assert child.result() is None
    child.close()
    peer.close()


def test_threads_of_the_parent_do_not_disturb() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    child, process = process_of(lambda: b"%d" % threading.active_count())
    assert outcome(child) == b"1"
    stop.set()
    thread.join()
    child.close()
    assert is_gone(process)


def test_priority_is_lower_and_collection_is_off() -> None:
    def function() -> bytes:
        import gc

        return f"{os.nice(0)} {gc.isenabled()}".encode()

    child, _ = process_of(function)
    assert outcome(child) == f"{min(19, os.nice(0) + forked.NICENESS)} False".encode()
    child.close()


def test_no_process_to_be_had_is_an_error_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(OSError, match="temporarily unavailable"):
        Forked(lambda: b"", LIMIT_S)
    assert len(os.listdir("/proc/self/fd")) == before
