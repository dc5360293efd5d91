"""Starts and ends of servers whose file systems are full."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import wait_until
from tests.e2e.models import stub
from tests.faults import disks
from tests.faults.servers import Place, Supervised

MODEL = stub(us_per_token=0)
pytestmark = pytest.mark.faults


@pytest.fixture
def folder() -> Iterator[Path]:
    if reason := disks.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="hr-full-") as made:
        yield Path(made)


def confined(mount: str, fill: str, *flags: str, output: str = "") -> Supervised:
    """A server with a small file system, and a file that fills it. output: where it writes its log instead of here."""
    redirect = f">> {output} 2>&1" if output else ""
    filled = f"mount -t tmpfs -o size=8m tmpfs {mount} && (cat /dev/zero > {fill}; true) 2> /dev/null"
    script = f'{filled} && exec "$@" {redirect}'
    place = Place(prefix=("unshare", "-m", "sh", "-c", script, "sh"))
    return Supervised("confined", (*flags, "--dtype", "float32"), [free_port()], place)


def ended_well(server: Supervised) -> None:
    assert server.end() == 0, server.log
    assert "Traceback" not in server.log


def test_a_start_with_a_full_cache_folder(folder: Path) -> None:
    """The tokenizer is converted in the temporary folder, and the log says so."""
    flags = ("--model", "smollm2", "--kv-pages", "64", "--max-model-len", "512", "--cache-dir", str(folder))
    with closing(confined(str(folder), f"{folder}/filler", *flags)) as server:
        server.started()
        assert "No space left on device: the tokenizer is converted at every start" in server.log
        ended_well(server)


def test_a_start_with_full_shared_memory() -> None:
    """KV comes by ZMQ, and the log says why."""
    if reason := disks.missing():
        pytest.skip(reason)
    prefill = Supervised("prefill", ("--role", "prefill", *MODEL.flags), [free_port()])
    with closing(prefill):
        flags = ("--role", "decode", "--prefill", prefill.url, *MODEL.flags, "--kv-pages", "4000")
        with closing(confined("/dev/shm", "/dev/shm/filler", *flags)) as decode:
            for server in (prefill, decode):
                server.started()
            MODEL.check(decode, (1, 17, 300), 4)
            assert "by zmq: not shm" in prefill.log
            assert "cannot be in shared memory: [Errno 28] No space left on device" in decode.log
            ended_well(decode)
        ended_well(prefill)


def test_an_orderly_end_with_a_full_log(folder: Path) -> None:
    """What cannot be logged is not: the server drains and ends with status 0."""
    mounted = f"{folder}/log"
    os.mkdir(mounted)
    flags = ("--role", "colocated", *MODEL.flags)
    with closing(confined(mounted, f"{mounted}/filler", *flags, output=f"{mounted}/output")) as server:
        server.started()
        MODEL.check(server, (1, 300), 4)
        server.child("headrace.engine.stage").send_signal(signal.SIGKILL)
        wait_until(lambda: not server.ready(), 20, "the stage is missed")
        server.started()
        MODEL.check(server, (1, 300), 4)
        assert server.end() == 0, subprocess.run(["df", folder], capture_output=True, text=True, check=False).stdout
