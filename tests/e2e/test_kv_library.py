"""KV files of whole servers: a baked prefix gives the text and KV of a computed one; a bad file does no harm."""

import json
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.kv_library import plain_server, range_server
from headrace.core.types.kv.kv_files import KvFileHeader, pack_start
from headrace.engine.kv.tiers.kv_source import FileSource, read_header
from headrace.integrations.http_client import bearer, direct_client
from tests.e2e.harness import Server, serving

TOKENS = [100 + index * 31 % 20_000 for index in range(330)]  # 20 pages of 16, and ten more
FLAGS = ("--role", "colocated", "--threads", "1", "--dtype", "float32", "--kv-pages", "512", "--max-model-len", "2048")
BAKE = ("--threads", "1", "--dtype", "float32", "--kv-pages", "512", "--max-model-len", "2048")


def bake(out: Path, tokens: list[int] = TOKENS, flags: tuple[str, ...] = BAKE) -> None:
    ids = out.with_suffix(".json")
    ids.write_text(json.dumps(tokens))
    command = [sys.executable, "-m", "headrace.cli.commands", "bake", "--token-ids", str(ids), "-o", str(out), *flags]
    subprocess.run(command, check=True, timeout=240)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    bake(folder / "handbook.kv")
    return folder


def ask(server: Server, tail: int) -> tuple[str, int]:
    """The completion of the prefix and a tail, and how many tokens came from KV files."""
    body = {"model": "smollm2", "prompt": [*TOKENS, tail], "max_tokens": 8, "temperature": 0}
    reply = server.post("/v1/completions", body).json()
    details = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens_details", {})
    return reply["choices"][0]["text"], details.get("library", 0)


def wait_used(server: Server) -> None:
    until = time.monotonic() + 60
    while server.metrics().get('headrace_kv_tier_pages{state="used",tier="library"}', 0) < 20:
        assert time.monotonic() < until, "the file is found"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def computed() -> str:
    with serving(*FLAGS) as server:
        return ask(server, 7)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "stages"),
    [("folder", ()), ("folder", ("--pp", "2")), ("folder", ("--tp", "3")), ("http", ("--pp", "2")), ("ranges", ())],
)
def test_a_baked_prefix_gives_the_same_text(place: str, stages: tuple[str, ...], library: Path, computed: str) -> None:
    subprocess.run([sys.executable, "-m", "headrace.cli.commands", "bake", "--index", str(library)], check=True)
    if place == "folder":
        check(str(library), stages, computed)
        return
    with (plain_server if place == "http" else range_server)(library) as url:
        check(url, stages, computed)


def check(place: str, stages: tuple[str, ...], computed: str) -> None:
    with serving(*FLAGS, *stages, "--kv-library", place) as server:
        wait_used(server)
        assert ask(server, 7) == (computed, 320)
        assert ask(server, 7) == (computed, 0), "it is in the pool now"


@pytest.mark.full
def test_the_pages_are_those_that_the_server_computes(library: Path, tmp_path: Path) -> None:
    """Bit for bit, in whatever chunks: what a server writes to its disk tier is what is in the file."""
    disk = tmp_path / "disk"
    flags = ("--disk-path", str(disk), "--disk-admission-turn", "0", "--chunk-tokens", "48", "--disk-gib", "1")
    with serving(*FLAGS, *flags) as server:
        ask(server, 7)
        until = time.monotonic() + 30
        while server.metrics().get('headrace_kv_tier_pages{state="used",tier="disk"}', 0) < 20:
            assert time.monotonic() < until
            time.sleep(0.1)
    header = header_of(library / "handbook.kv")
    data = b"".join(path.read_bytes() for path in sorted(disk.rglob("segment-*.kv")))
    record = header.page_bytes + 512
    stored = {sha256(data[at + 512 : at + record]).digest() for at in range(0, len(data) - record + 1, record)}
    assert {header.checksum(page) for page in range(header.pages)} <= stored


def header_of(path: Path) -> KvFileHeader:
    source = FileSource(str(path))
    try:
        return read_header(source, time.monotonic() + 10)[1]
    finally:
        source.close()


@pytest.mark.full
def test_a_bad_page_is_computed_again_and_a_new_file_is_found(library: Path, computed: str, tmp_path: Path) -> None:
    data = bytearray((library / "handbook.kv").read_bytes())
    header = header_of(library / "handbook.kv")
    at = len(pack_start(header)) + 12 * header.page_bytes + 99
    data[at] ^= 1
    with serving(*FLAGS, "--kv-library", str(tmp_path), "--kv-library-seconds", "1") as server:
        (tmp_path / "late.part").write_bytes(data)
        (tmp_path / "late.part").rename(tmp_path / "late.kv")
        wait_used(server)
        assert ask(server, 7)[0] == computed
        metrics = server.metrics()
        key = 'headrace_stage_tier_failures_total{direction="load",reason="checksum",stage="0",tier="library"}'
        assert metrics[key] == 1
        assert ask(server, 7) == (computed, 0)


@pytest.mark.full
def test_tenants_share_it_and_salted_prompts_do_not(library: Path) -> None:
    keys = ("--tenant-key", "ann=key-a", "--tenant-key", "bob=key-b")
    with serving(*FLAGS, *keys, "--kv-library", str(library)) as server:
        for tail, (key, salt, expected) in enumerate((("key-a", None, 320), ("key-b", None, 320), ("key-a", "s", 0))):
            with direct_client(base_url=server.url, headers=bearer(key), timeout=60) as client:
                until = time.monotonic() + 60
                while 'tier="library",state="used"} 60' not in client.get("/metrics").text.replace(
                    'state="used",tier="library"', 'tier="library",state="used"'
                ):
                    assert time.monotonic() < until, "20 pages for each of three salts"
                    time.sleep(0.1)
                body = {"model": "smollm2", "prompt": [*TOKENS, tail], "max_tokens": 8, "cache_salt": salt}
                usage = client.post("/v1/completions", json=body).json()["usage"]
            details = (usage.get("prompt_tokens_details") or {}).get("cached_tokens_details", {})
            assert details.get("library", 0) == expected
