"""Pages of KV files as stages read them: each its own part, from folders and stores, and nothing that was changed."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.kv_library import RangeHandler
from headrace.core.messages.orders import CloseKvFile, OpenKvFile
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.engine.kv.tiers import library_store
from headrace.engine.kv.tiers.kv_source import HttpSource, SourceError
from headrace.engine.kv.tiers.library_store import LibraryStore
from headrace.engine.kv.tiers.pages import TierError
from tests.kv_files import PAGE_SIZE, TENSORS, kv_file, write

WHOLE = Geometry("float32", 4, 2, 8, PAGE_SIZE)
FIRST = 100
COUNT = 6


class Plain(SimpleHTTPRequestHandler):
    """Python's own file server, without its log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Slow(Plain):
    """A byte now and then."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        for _ in range(50):
            self.wfile.write(b"H")
            time.sleep(0.02)


class Elsewhere(Plain):
    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()


@contextmanager
def serving(handler: type[SimpleHTTPRequestHandler], folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(params=["folder", "plain", "ranges"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where files that are put into tmp_path are found."""
    if request.param == "folder":
        yield str(tmp_path)
        return
    with serving({"plain": Plain, "ranges": RangeHandler}[request.param], tmp_path) as url:
        yield url


OPENED: list[LibraryStore] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No test leaves a connection behind."""
    yield
    while OPENED:
        OPENED.pop().close()


def opened(
    place: str,
    digest: bytes,
    geometry: Geometry = WHOLE,
    pages: int = COUNT,
    clock: Callable[[], float] = time.monotonic,
) -> LibraryStore:
    store = LibraryStore("fp", geometry, clock)
    OPENED.append(store)
    store.apply(OpenKvFile(seq=1, first=FIRST, pages=pages, location=f"{place}/a.kv", digest=digest))
    store.expect(range(FIRST, FIRST + pages))
    return store


def written(folder: Path) -> tuple[bytes, list[bytes]]:
    header, pages = kv_file(range(COUNT * PAGE_SIZE))
    return write(folder / "a.kv", header, pages), pages


def test_pages_are_read_in_any_order(place: str, tmp_path: Path) -> None:
    digest, pages = written(tmp_path)
    store = opened(place, digest)
    for index in (0, 1, 2, 5, 3, 4, 0):
        assert store.get(FIRST + index).tobytes() == pages[index]
    store.close()


@pytest.mark.parametrize(
    "part",
    [
        Geometry("float32", 1, 2, 8, PAGE_SIZE, layer_start=3),
        Geometry("float32", 2, 1, 8, PAGE_SIZE, layer_start=1, head_start=1),
        Geometry("float32", 4, 1, 8, PAGE_SIZE),
    ],
)
def test_a_stage_takes_its_layers_and_heads(part: Geometry, tmp_path: Path) -> None:
    digest, pages = written(tmp_path)
    store = opened(str(tmp_path), digest, part)
    whole = np.frombuffer(pages[2], np.float32).reshape(4, 2, 2, PAGE_SIZE, 8)
    own = part.tensors[0]
    expected = whole[own.layer_start : own.layer_end, :, own.head_start : own.head_end]
    got = store.get(FIRST + 2)
    assert got.flags.c_contiguous
    assert len(got) == part.page_bytes
    assert got.tobytes() == expected.tobytes()


def test_tensors_go_by_name(tmp_path: Path) -> None:
    second = Component("index", "uint8", 2, 1, 16, planes=1)
    header, pages = kv_file(range(PAGE_SIZE), tensors=(second, *TENSORS))
    digest = write(tmp_path / "a.kv", header, pages)
    own = msgspec.structs.replace(WHOLE, components=(second,))
    size = second.token_bytes * PAGE_SIZE
    got = opened(str(tmp_path), digest, own, 1).get(FIRST).tobytes()
    assert got == pages[0][size:] + pages[0][:size]


def test_a_changed_page_is_refused_for_good_and_the_others_are_not(place: str, tmp_path: Path) -> None:
    digest, pages = written(tmp_path)
    data = bytearray((tmp_path / "a.kv").read_bytes())
    data[-COUNT * len(pages[0]) + 3 * len(pages[0]) + 77] ^= 16
    (tmp_path / "a.kv").write_bytes(data)
    store = opened(place, digest)
    for index in (2, 3, 4):
        if index == 3:
            with pytest.raises(TierError, match="SHA-256") as raised:
                store.get(FIRST + index)
            assert raised.value.reason == "checksum"
        else:
            assert store.get(FIRST + index).tobytes() == pages[index]
    (tmp_path / "a.kv").unlink()
    with pytest.raises(TierError, match="it was changed"):
        store.get(FIRST + 3)  # without reading it again


def test_swapped_pages_and_another_file_in_its_place_are_refused(place: str, tmp_path: Path) -> None:
    header, pages = kv_file(range(COUNT * PAGE_SIZE))
    digest = write(tmp_path / "a.kv", header, [pages[1], pages[0], *pages[2:]])
    with pytest.raises(TierError, match="SHA-256"):
        opened(place, digest).get(FIRST)
    write(tmp_path / "a.kv", *kv_file(range(COUNT * PAGE_SIZE), seed=9))
    store = opened(place, digest)
    for _ in range(2):
        with pytest.raises(TierError, match="another file than was listed"):
            store.get(FIRST)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"fingerprint": "other"}, "another model"),
        ({"tensors": (Component("kv", "float16", 4, 2, 8),)}, "no tensor kv"),
        ({"tensors": (Component("kv", "float32", 3, 2, 8),)}, "no tensor kv"),
        ({"tensors": (Component("latent", "float32", 4, 2, 8),)}, "no tensor kv"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(header: dict[str, Any], words: str, tmp_path: Path) -> None:
    digest = write(tmp_path / "a.kv", *kv_file(range(COUNT * PAGE_SIZE), **header))
    with pytest.raises(TierError, match=words):
        opened(str(tmp_path), digest).get(FIRST)


def test_a_file_that_is_cut_off_or_gone_fails_and_is_not_tried_at_once(place: str, tmp_path: Path) -> None:
    digest, pages = written(tmp_path)
    whole = (tmp_path / "a.kv").read_bytes()
    (tmp_path / "a.kv").write_bytes(whole[: -len(pages[0]) - 5])
    now = [0.0]
    store = opened(place, digest, clock=lambda: now[0])
    store.expect([FIRST + 4])
    with pytest.raises(TierError) as raised:
        store.get(FIRST + 4)
    assert raised.value.reason == "io"
    (tmp_path / "a.kv").write_bytes(whole)
    with pytest.raises(TierError, match="a moment ago"):
        store.get(FIRST + 4)
    now[0] += library_store.RETRY_S
    store.expect([FIRST + 4])
    assert store.get(FIRST + 4).tobytes() == pages[4]


def test_slots_of_no_file_hold_nothing(tmp_path: Path) -> None:
    digest, _ = written(tmp_path)
    store = opened(str(tmp_path), digest)
    for slot in (0, FIRST - 1, FIRST + COUNT):
        with pytest.raises(TierError, match="of no file"):
            store.get(slot)
    store.apply(CloseKvFile(seq=2, first=FIRST))
    with pytest.raises(TierError, match="of no file"):
        store.get(FIRST)
    with pytest.raises(TierError, match="only read"):
        store.put(FIRST, (), None)


def test_a_pipe_and_a_folder_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.kv")
    with pytest.raises(TierError, match="no regular file"):
        opened(str(tmp_path), bytes(32)).get(FIRST)


def test_a_store_that_drips_is_given_up_in_time(tmp_path: Path) -> None:
    with serving(Slow, tmp_path) as url:
        began = time.monotonic()
        with pytest.raises(SourceError, match="too slow"):
            HttpSource(f"{url}/a.kv").read_into(memoryview(bytearray(1000)), 0, began + 0.2)
        assert time.monotonic() - began < 0.8


def test_no_redirect_is_followed(tmp_path: Path) -> None:
    with serving(Elsewhere, tmp_path) as url, pytest.raises(SourceError, match="answers 302"):
        HttpSource(f"{url}/a.kv").read_into(memoryview(bytearray(10)), 0, time.monotonic() + 5)


def test_what_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(bytes(5000))
    with serving(Plain, tmp_path) as url:
        source = HttpSource(f"{url}/index.json")
        assert source.read_all(5000, time.monotonic() + 5) == bytes(5000)
        with pytest.raises(SourceError, match="more than 4999 bytes"):
            source.read_all(4999, time.monotonic() + 5)
