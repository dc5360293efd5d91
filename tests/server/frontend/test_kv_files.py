"""Which KV files a server takes: those in folders and stores that fit it; all others are refused and counted."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from headrace.core.config import Config, EngineConfig, SchedulerConfig
from headrace.core.messages.replies import StagePools
from headrace.core.types.kv.geometry import Component
from headrace.server.frontend.kv_files import KvFileWatch
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.tools.bake.kv_file import write_index
from tests.engine.kv.tiers.test_library_store import Plain
from tests.kv_files import COMPUTATION, PAGE_SIZE, TENSORS, kv_file, write

POOLS = StagePools(fingerprint="fp", kv_pages=9, data_endpoints=(), tensors=TENSORS, computations=(COMPUTATION,))
TOKENS = range(3 * PAGE_SIZE)


def watch(*places: object, salts: tuple[str, ...] = ("",), **engine: Any) -> KvFileWatch:
    config = Config(
        engine=EngineConfig(kv_library=tuple(map(str, places)), page_size=PAGE_SIZE, **engine),
        scheduler=SchedulerConfig(library_salts=salts),
    )
    return KvFileWatch(config, cast(SchedulerClient, None), lambda _message: None)


def states(looking: KvFileWatch) -> dict[str, float]:
    return {sample.labels[0]: sample.value for sample in looking.statistics() if sample.value}


@contextmanager
def store(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Plain, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_files_that_appear_change_and_go_are_noticed(tmp_path: Path) -> None:
    looking = watch(tmp_path)
    assert looking.look(POOLS) == []
    digest = write(tmp_path / "a.kv", *kv_file(TOKENS))
    (tmp_path / "notes.txt").write_text("no KV file")
    (found,) = looking.look(POOLS)
    assert (found.location, found.digest, len(found.tokens)) == (str(tmp_path / "a.kv"), digest, 4 * len(TOKENS))
    assert looking.look(POOLS) == [found]
    (tmp_path / "a.kv").unlink()
    write(tmp_path / "a.kv", *kv_file(range(8)))
    (changed,) = looking.look(POOLS)
    assert changed.digest != digest
    (tmp_path / "a.kv").unlink()
    assert looking.look(POOLS) == []


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.kv", *kv_file(TOKENS))
    looking = watch(tmp_path)
    (found,) = looking.look(POOLS)
    monkeypatch.setattr("headrace.server.frontend.kv_files.read_header", None)
    assert looking.look(POOLS) == [found]


def test_a_store_is_looked_through_by_its_index(tmp_path: Path) -> None:
    digest = write(tmp_path / "a.kv", *kv_file(TOKENS))
    write(tmp_path / "b.kv", *kv_file(range(50, 70)))
    write_index(tmp_path)
    write(tmp_path / "not-listed.kv", *kv_file(range(90, 98)))
    with store(tmp_path) as url:
        found = watch(f"{url}/").look(POOLS)
        assert [each.location for each in found] == [f"{url}/a.kv", f"{url}/b.kv"]
        assert found[0].digest == digest
        assert watch(f"{url}/not-listed.kv").look(POOLS)[0].location == f"{url}/not-listed.kv"


@pytest.mark.parametrize(
    ("fields", "state", "words"),
    [
        ({"fingerprint": "other"}, "model", "it is of model other, this server's is fp"),
        ({"page_size": 8}, "geometry", "its pages have 8 tokens, --page-size 4"),
        (
            {"tensors": (Component("kv", "bfloat16", 4, 2, 8),)},
            "geometry",
            "its pages have kv bfloat16 [4, 2, 2, 8], this server's kv float32 [4, 2, 2, 8]",
        ),
        (
            {"computation": msgspec.structs.replace(COMPUTATION, device="cpu test avx512f")},
            "computation",
            "its device is 'cpu test avx512f', this server's 'cpu test avx2'",
        ),
        ({"computation": msgspec.structs.replace(COMPUTATION, torch="2.12.0")}, "computation", "its torch is '2.12.0'"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values_once(
    fields: dict[str, Any], state: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.kv", *kv_file(range(24), **fields))
    write(tmp_path / "good.kv", *kv_file(TOKENS))
    looking = watch(tmp_path)
    for _ in range(3):
        assert [Path(each.location).name for each in looking.look(POOLS)] == ["good.kv"]
    assert states(looking) == {state: 1, "used": 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert words in line


def test_other_computations_are_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    other = msgspec.structs.replace(COMPUTATION, device="another", headrace="0.0.1")
    write(tmp_path / "a.kv", *kv_file(TOKENS, computation=other))
    assert len(watch(tmp_path, kv_library_any_cpu=True).look(POOLS)) == 1
    assert watch(tmp_path).look(POOLS) == []


@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "empty", "text"])
def test_poisoned_files_are_refused(harm: str, tmp_path: Path) -> None:
    write(tmp_path / "a.kv", *kv_file(TOKENS))
    data = (tmp_path / "a.kv").read_bytes()
    spoilt = {
        "flip": data[:100] + bytes([data[100] ^ 1]) + data[101:],
        "cut": data[:-1],
        "longer": data + b"\0",
        "empty": b"",
        "text": b"this is no KV file, and long enough to be looked at: " * 9,
    }[harm]
    (tmp_path / "a.kv").write_bytes(spoilt)
    looking = watch(tmp_path)
    assert looking.look(POOLS) == []
    assert sum(states(looking).values()) == 1


def test_more_pages_than_there_is_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.frontend.kv_files.LIBRARY_PAGES", 7)
    write(tmp_path / "a.kv", *kv_file(TOKENS))
    write(tmp_path / "b.kv", *kv_file(range(100, 100 + len(TOKENS))))
    looking = watch(tmp_path, salts=("", "tenant"))
    assert len(looking.look(POOLS)) == 1
    assert states(looking) == {"used": 1, "room": 1}


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b'{"files": [{"name": "../a.kv", "size": 1, "digest": "%s"}]}' % (b"0" * 64),
        b'{"files": [{"name": "/etc/a.kv", "size": 1, "digest": "%s"}]}' % (b"0" * 64),
        b'{"files": [{"name": "http://127.0.0.1/a.kv", "size": 1, "digest": "%s"}]}' % (b"0" * 64),
        b'{"files": [{"name": "a.kv?x=.kv", "size": 1, "digest": "%s"}]}' % (b"0" * 64),
        b'{"files": [{"name": "a.kv", "size": -1, "digest": "%s"}]}' % (b"0" * 64),
        b'{"files": [{"name": "a.kv", "size": 1, "digest": "no"}]}',
    ],
)
def test_an_index_leads_nowhere_else(index: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.kv", *kv_file(TOKENS))
    (tmp_path / "index.json").write_bytes(index)
    with store(tmp_path) as url:
        looking = watch(url)
        assert looking.look(POOLS) == []
    assert states(looking) == {"unreadable": 1}
    assert "index.json" in caplog.text


def test_a_file_that_is_not_what_the_index_says_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.kv", *kv_file(TOKENS))
    write_index(tmp_path)
    write(tmp_path / "a.kv", *kv_file(TOKENS, seed=4))
    with store(tmp_path) as url:
        looking = watch(url)
        assert looking.look(POOLS) == []
    assert states(looking) == {"format": 1}


def test_places_that_are_not_there_are_looked_for_again(tmp_path: Path) -> None:
    write(tmp_path / "a.kv", *kv_file(TOKENS))
    looking = watch(tmp_path / "later", tmp_path, "http://127.0.0.1:1")
    assert len(looking.look(POOLS)) == 1
    assert states(looking) == {"used": 1, "unreadable": 2}
    (tmp_path / "later").mkdir()
    write(tmp_path / "later" / "b.kv", *kv_file(range(8)))
    assert len(looking.look(POOLS)) == 2
