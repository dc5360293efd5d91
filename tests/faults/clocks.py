"""Jumping clocks: CLOCK_REALTIME of each server is what a file says, by a shim that is loaded before libc."""

import ctypes
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.faults.cells import Strike
from tests.faults.pair import Pair, relayed_pair
from tests.faults.servers import Place

SHIM = Path(__file__).with_name("clock_shim.c")
VARIABLE = "HEADRACE_TEST_CLOCK_FILE"


@contextmanager
def skewed_pair() -> Iterator[Pair]:
    """A pair whose clocks can be set."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-clock-")))
        library = folder / "clock_shim.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, SHIM, "-ldl"], check=True, timeout=60)
        places = []
        for name in ("prefill", "decode"):
            (folder / name).write_bytes(bytes(8))
            environment = {"LD_PRELOAD": str(library), VARIABLE: str(folder / name)}
            places.append(Place(environment=environment))
        yield stack.enter_context(relayed_pair(places=(places[0], places[1])))


def jumped(servers: tuple[str, ...], seconds: int) -> Strike:
    """The clocks of these servers jump by so much, and back."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        files = [
            server.place.environment[VARIABLE] for server in pair.servers if server.name in servers
        ]  # fmt: skip
        for path in files:
            _set(path, seconds)
        try:
            yield
        finally:
            for path in files:
                _set(path, 0)

    return strike


def _set(path: str, seconds: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(descriptor, 8) as memory:
            memory[:] = bytes(ctypes.c_int64(seconds))
    finally:
        os.close(descriptor)
