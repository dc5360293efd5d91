"""Where the ranks of servers that share experts meet: who is waited for, who is admitted, who is refused."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.external import ExternalMember
from headrace.engine.parallel import meeting as module
from headrace.engine.parallel.meeting import Attendance, MemberRegistration, meet
from headrace.server.launch.free_port import free_port

TERMS = {"--dtype": "float32", "--page-size": "16"}


def config(rank: int, size: int, port: int) -> StageConfig:
    return StageConfig(
        rank=0,
        endpoint="",
        model=ModelConfig(),
        engine=EngineConfig(),
        transfer=TransferConfig(),
        member=ExternalMember(rank, size, "127.0.0.1", port),
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.02)
    monkeypatch.setattr(module, "FRESH_S", 0.5)


def registered(incarnation: str, beat: int = 1) -> MemberRegistration:
    return MemberRegistration(incarnation, beat, {})


def test_a_rank_that_no_longer_repeats_its_registration_is_missing() -> None:
    attendance = Attendance(3)
    attendance.see(1, registered("a"), 0.0)
    attendance.see(2, registered("b"), 0.4)
    assert attendance.missing(0.5) == []
    attendance.see(1, registered("a"), 0.8)
    assert attendance.missing(0.8) == [1], "it has said the same before: its process has ended"
    attendance.see(1, registered("c"), 0.85)
    assert attendance.missing(0.85) == []
    assert attendance.incarnations() == ("c", "b")
    assert Attendance(3).missing(0.0) == [1, 2]


@pytest.mark.parametrize("first", [0, 1], ids=["server 0 first", "server 0 late"])
def test_ranks_meet_whoever_comes_first(first: int) -> None:
    size, port = 3, free_port()
    begun = threading.Event()

    def work(rank: int) -> Any:
        if rank == first:
            begun.set()
        else:
            begun.wait()
            time.sleep(0.1)
        store = meet(config(rank, size, port), TERMS)
        store.set(f"from-{rank}", str(rank))
        return store

    with ThreadPoolExecutor(size) as pool:
        stores = list(pool.map(work, range(size)))
    assert [[store.get(f"from-{rank}") for rank in range(size)] for store in stores] == [[b"0", b"1", b"2"]] * size


def test_a_server_with_other_terms_is_refused_by_name_and_the_others_go_on_waiting() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(meet, config(0, 2, port), TERMS)
        with pytest.raises(ConfigError) as refused:
            meet(config(1, 2, port), {"--dtype": "bfloat16", "--page-size": "16"})
        assert str(refused.value) == (
            f"--dp-external 1/2@127.0.0.1:{port}: server 1 does not fit server 0: --dtype is bfloat16 here and float32 "
            "there; all servers of a group need the same"
        )
        assert not hosting.done()
        hosted, visited = hosting, meet(config(1, 2, port), TERMS)
        visited.set("there", "yes")
        assert hosted.result().get("there") == b"yes"


def wait_registered(port: int, key: str) -> None:
    store = None
    while store is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.get(key)  # waits for it


def test_a_number_that_another_server_has_is_refused() -> None:
    size, port = 3, free_port()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(meet, config(rank, size, port), TERMS) for rank in (0, 1)]
        wait_registered(port, "rank-1")
        with pytest.raises(ConfigError, match="another server is there as 1; give each server a rank of its own"):
            meet(config(1, size, port), TERMS)
        stores = [meet(config(2, size, port), TERMS), *(each.result() for each in waiting)]
        assert len(stores) == size


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server 0 cannot listen at 127.0.0.1:{port}: .*in use"):
            meet(config(0, 2, port), TERMS)
