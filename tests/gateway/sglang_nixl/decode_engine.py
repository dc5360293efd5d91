"""The decode side of SGLang 0.5.23, played by a script: a process with a NIXL agent of its own, and host memory.

python -m tests.gateway.sglang_nixl.decode_engine SETUP   takes lines of JSON, and says what it hears

It asks the bootstrap server, registers, names pages, aborts, and looks at nothing: its memory is a file that the test
looks at. No SGLang is in it.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from headrace.transfer.protocol.layout import Bytes
from tests.gateway.sglang_nixl import decode_frames

AUX_ROWS = 16
AUX_BYTES = (64, 64, 64, 64, 512, 512, 64, 128, 256, 64)  # of a row in each metadata buffer
RANKS = "prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"


class Setup(msgspec.Struct, frozen=True):
    """One rank of an engine. file: its memory."""

    file: str
    bootstrap: str
    layers: int
    heads: int
    token_bytes: int
    """Of one head."""
    page_size: int
    pages: int
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.heads * self.token_bytes

    @property
    def kv_bytes(self) -> int:
        return 2 * self.layers * self.pages * self.page_bytes

    @property
    def aux_starts(self) -> list[int]:
        return [self.kv_bytes + AUX_ROWS * sum(AUX_BYTES[:index]) for index in range(len(AUX_BYTES))]

    @property
    def bytes(self) -> int:
        return self.kv_bytes + AUX_ROWS * sum(AUX_BYTES)

    def mapped(self) -> Bytes:
        memory: Bytes = np.memmap(self.file, np.uint8, "r+", shape=(self.bytes,))
        return memory


class DecodeEngine:
    """The process, seen from the test."""

    def __init__(self, folder: Path, setup: dict[str, Any]) -> None:
        file = folder / f"decode-{time.monotonic_ns()}"
        self.setup = Setup(file=str(file), **setup)
        file.touch()
        os.truncate(file, self.setup.bytes)
        command = [sys.executable, "-m", __name__, msgspec.json.encode(self.setup).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.memory = self.setup.mapped()
        self._read = b""
        self.heard: list[list[str]] = []
        self.info: dict[str, Any] = {}
        self.agent = ""

    @property
    def kv(self) -> Bytes:
        """[K, V], layers, pages, tokens, heads, bytes."""
        one = self.setup
        shape = 2, one.layers, one.pages, one.page_size, one.heads, one.token_bytes
        return self.memory[: one.kv_bytes].reshape(shape)

    def aux(self, buffer: int, row: int) -> bytes:
        """A row of a metadata buffer."""
        start = self.setup.aux_starts[buffer] + row * AUX_BYTES[buffer]
        return self.memory[start : start + AUX_BYTES[buffer]].tobytes()

    def order(self, what: str, **how: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **how}).encode() + b"\n")
        self._process.stdin.flush()

    def register(self) -> None:
        """Ask the bootstrap server, and tell the rank that it names of this memory."""
        self.order("register")
        self._until(lambda: self.agent, 60.0)  # an agent takes seconds to start

    def messages(self, kind: str, room: int, timeout_s: float = 20.0) -> list[list[str]]:
        """Those of a kind about a room, at least one."""

        def found() -> list[list[str]]:
            return [frames for frames in self.heard if frames[:2] == [kind, str(room)]]

        self._until(found, timeout_s)
        return found()

    def status(self, room: int, timeout_s: float = 20.0) -> tuple[str, str]:
        """Of KV_STATUS: the status and the reason."""
        [(_, _, status, rank, reason)] = self.messages("KV_STATUS", room, timeout_s)
        assert rank == "0"
        return status, reason

    def hear(self, seconds: float = 0.0) -> None:
        """Take what the process says."""
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], seconds)[0]:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the decode engine has ended"
            self._read, seconds = self._read + data, 0.0
        *lines, self._read = self._read.split(b"\n")
        for line in map(json.loads, lines):
            self.info, self.agent = line.get("info", self.info), line.get("agent", self.agent)
            if "heard" in line:
                self.heard.append(line["heard"])

    def _until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        self.hear()
        while not condition():
            assert time.monotonic() < end, f"not within {timeout_s} s; heard {self.heard}"
            self.hear(0.05)

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        Path(self.setup.file).unlink()


def main(setup: Setup) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its log to standard output

    def say(**what: Any) -> None:
        said.write(json.dumps(what) + "\n")
        said.flush()

    def get(ranks: int) -> Any:
        with urllib.request.urlopen(f"http://{setup.bootstrap}/route?{RANKS.format(ranks)}", timeout=5) as answer:
            return json.load(answer)

    memory = setup.mapped()
    base = int(memory.ctypes.data)
    agent = nixl_agent(f"decode-{os.getpid()}", nixl_agent_config(backends=[]))
    agent.create_backend("UCX", {})
    agent.register_memory(
        [(base, setup.kv_bytes, 0, ""), (base + setup.kv_bytes, setup.bytes - setup.kv_bytes, 0, "")], "DRAM"
    )
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    own: dict[str, Any] = {"port": pull.bind_to_random_port("tcp://127.0.0.1"), "agent": agent.name}
    poller = zmq.Poller()
    poller.register(pull, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)

    def obey(order: dict[str, Any]) -> None:
        match order.pop("do"):
            case "register":
                info = get(-1)
                for name, own_value in (("page_size", setup.page_size), ("kv_cache_dtype", "auto")):
                    assert info[name] in (None, own_value), "else the real one ends"
                rank = get(0)
                push.connect(f"tcp://{rank['rank_ip']}:{rank['rank_port']}")
                size = setup.pages * setup.page_bytes
                frames = decode_frames.registration(
                    **own,
                    metadata=agent.get_agent_metadata(),
                    kv=[base + index * size for index in range(2 * setup.layers)],
                    aux=[base + start for start in setup.aux_starts],
                    tp_size=setup.tp_size,
                    tp_rank=setup.tp_rank,
                    page_bytes=setup.page_bytes,
                    pages=setup.pages,
                )
                push.send_multipart(frames)
                say(info=info, agent=agent.name)
            case "room":
                push.send_multipart(decode_frames.room(order.pop("room"), order.pop("pages"), **own, **order))
            case "abort":
                generation = order.get("generation")
                push.send_multipart(decode_frames.abort(order["room"], port=own["port"], generation=generation))

    read = b""
    while True:
        ready = dict(poller.poll())
        if pull in ready:
            say(heard=[frame.decode() for frame in pull.recv_multipart()])
        if sys.stdin.fileno() not in ready:
            continue
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:
            return
        *lines, read = (read + data).split(b"\n")
        for order in map(json.loads, lines):
            obey(order)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Setup))
