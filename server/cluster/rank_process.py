"""A rank on a node of a cluster: the process `headrace stage`, started and stopped from elsewhere."""

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence

from headrace.core.config import STAGE_KEY_VARIABLE
from headrace.core.runtime.process import module_command
from headrace.server.launch.free_port import free_port


class RankProcess:
    """Runs in a worker of the cluster, with stop() in another thread than run(). The worker's end, however it comes, is
    that of the process, too."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def port(self) -> int:
        """A port that is free on this node."""
        return free_port()

    def knows_key(self, digest: str) -> bool:
        """Whether the stage key with this SHA-256, in hexadecimal, is in the worker's environment: it need not be sent
        then, where others who may use the cluster can read it."""
        key = os.environ.get(STAGE_KEY_VARIABLE, "")
        return hashlib.sha256(key.encode()).hexdigest() == digest

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run `headrace stage` until it exits. environment: variables besides those of the worker. Returns its exit
        status."""
        command = module_command("headrace.cli.commands", "stage", *arguments)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **environment})
        return self._process.wait()

    def stop(self) -> None:
        """Kill the process, if one runs."""
        if self._process is not None:
            self._process.kill()
