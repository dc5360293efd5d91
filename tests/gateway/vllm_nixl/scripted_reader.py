"""A decode engine's worker in a process of its own: does the handshake, reads blocks through NIXL, sends notices.

Run as a module: it takes one command per line of standard input, in JSON, and answers each in a line.
"""

import base64
import json
import os
import secrets
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np

from headrace.gateway.vllm_nixl.engine_probe import ask_side_channel
from headrace.gateway.vllm_nixl.wire import AgentMetadata


class Reader:
    """The process, from outside."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.agent = self._ask(do="name")["name"]

    def handshake(self, params: dict[str, Any]) -> str:
        """Load the agent that the params name; returns the engine id that was answered."""
        return str(self._ask(do="handshake", host=params["remote_host"], port=params["remote_port"])["engine_id"])

    def read(self, params: dict[str, Any], *, readers: int = 1, notify: bool = True) -> np.ndarray[Any, Any] | None:
        """Bytes of the blocks, [layers, blocks, block bytes], by the agent of the handshake; None if NIXL fails."""
        found = self._ask(do="read", params=params, readers=readers, notify=notify)
        if found["data"] is None:
            return None
        return np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(found["shape"])

    def notify(self, text: str, engine_id: str) -> None:
        self._ask(do="notify", text=text, engine_id=engine_id)

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        self.process.kill()
        with self.process:
            pass


class _Worker:
    """The process, from inside."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.name = secrets.token_hex(8)
        self._nixl = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
        self._remotes: dict[str, tuple[AgentMetadata, str]] = {}

    def handshake(self, host: str, port: int) -> dict[str, Any]:
        payload = ask_side_channel((host, port))
        agent = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
        self._remotes[agent.engine_id] = agent, self._nixl.add_remote_agent(agent.agent_metadata)
        return {"engine_id": agent.engine_id}

    def read(self, params: dict[str, Any], readers: int, notify: bool) -> dict[str, Any]:
        agent, remote = self._remotes[params["remote_engine_id"]]
        [blocks] = params["remote_block_ids"]
        length, layers = agent.block_lens[0], len(agent.block_lens)
        memory = np.zeros((layers, len(blocks), length), np.uint8)
        registered = self._nixl.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        here = [
            (memory.ctypes.data + (layer * len(blocks) + index) * length, length, 0)
            for layer in range(layers)
            for index in range(len(blocks))
        ]
        there = [
            (agent.kv_caches_base_addr[layer] + block * agent.block_strides[layer], length, 0)
            for layer in range(layers)
            for block in blocks
        ]
        text = f"{params['remote_request_id']}:{readers}".encode() if notify else b""
        try:
            handle = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(here, "DRAM"),
                self._nixl.get_xfer_descs(there, "DRAM"),
                remote,
                text,
            )
            state = self._nixl.transfer(handle)
            while state == "PROC":
                state = self._nixl.check_xfer_state(handle)
        except Exception as error:
            return {"data": None, "error": str(error)}
        finally:
            self._nixl.deregister_memory(registered)
        data = base64.b64encode(memory.tobytes()).decode() if state == "DONE" else None
        return {"data": data, "shape": memory.shape, "error": state}

    def notify(self, text: str, engine_id: str) -> dict[str, Any]:
        self._nixl.send_notif(self._remotes[engine_id][1], text.encode())
        return {}


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL writes its log to standard output
    worker = _Worker()
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        answer = {"name": worker.name} if do == "name" else getattr(worker, do)(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
