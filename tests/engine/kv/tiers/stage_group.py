"""Stage processes of one group, with the test in the scheduler's place."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.messages.orders import (
    AnyOrder,
    BeginEpoch,
    Forward,
    Heartbeat,
    PlanRow,
    ShutdownStage,
    stage_identity,
)
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    PlanDone,
    SampledToken,
    StageEvent,
    StageFailed,
    StageReady,
)
from headrace.core.runtime.codec import Codec, OrderLog
from headrace.core.runtime.frames import DOOR, make_door
from headrace.core.runtime.process import module_command
from headrace.core.types.ranks.layout import Layout
from headrace.server.launch.free_port import free_port
from headrace.server.launch.stage_connections import FrameRouter

Event = TypeVar("Event", bound=StageEvent)


class StageGroup:
    """Stages of a model, from the first order to the last."""

    def __init__(self, model: Path, folder: Path, layers: tuple[int, ...], epoch: int, **engine: Any) -> None:
        """layers: of each stage. engine: further fields of EngineConfig."""
        self.stages = len(layers)
        inner, self._outer = make_door()
        self._router = FrameRouter(inner)
        self._orders: Codec[AnyOrder] = Codec(AnyOrder)
        self._events: Codec[AnyStageEvent] = Codec(AnyStageEvent)
        self._came: list[AnyStageEvent] = []
        self._epoch = epoch
        self._log = OrderLog()
        self.seq = 0
        config = StageConfig(
            rank=0,
            layout=Layout(pp=self.stages),
            endpoint=f"{DOOR}{self._outer.fileno()}",
            model=ModelConfig(model=str(model), dtype="float32", device="cpu", max_model_len=256),
            engine=EngineConfig(kv_pages=48, threads=1, pp_layers=layers, **engine),
            transfer=TransferConfig(),
            epoch=epoch,
            rendezvous=f"127.0.0.1:{free_port()}",
        )
        self._processes = [self._start(msgspec.structs.replace(config, rank=stage)) for stage in range(self.stages)]
        self.ready = self.wait(StageReady)
        self.order(BeginEpoch(seq=0, epoch=epoch))

    def order(self, order: AnyOrder) -> int:
        """Give the next number to an order and send it to all stages. Returns the number."""
        self.seq += 1
        frame = self._orders.encode(msgspec.structs.replace(order, seq=self.seq))
        self._log.add(frame)
        self._send(frame)
        return self.seq

    def wait(self, kind: type[Event]) -> list[Event]:
        """The next event of this kind of each stage, in stage order."""
        found: dict[int, Event] = {}
        deadline = time.monotonic() + 60
        while len(found) < self.stages:
            for event in list(self._came):
                assert not isinstance(event, StageFailed), event.message
                if isinstance(event, kind) and event.stage not in found:
                    found[event.stage] = event
                    self._came.remove(event)
            assert time.monotonic() < deadline, f"no {kind.__name__}"
            self._receive()
        return [found[stage] for stage in range(self.stages)]

    def forward(self, row: PlanRow) -> list[SampledToken]:
        """Compute a row. Returns what was sampled."""
        self.order(Forward(seq=0, rows=(row,)))
        return list(self.wait(PlanDone)[-1].samples)

    def end(self) -> None:
        """Check that every stage has had all orders, and end them."""
        self._send(self._orders.encode(Heartbeat(seq=0, orders=self._log.count, digest=self._log.digest)))
        self.order(ShutdownStage(seq=0))
        for process in self._processes:
            assert process.wait(20) == 0
        self._close()

    def kill(self) -> None:
        """End what is left of it."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._close()

    def _close(self) -> None:
        self._router.close()
        self._outer.close()

    def _start(self, config: StageConfig) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "WORLD_SIZE": str(self.stages), "RANK": str(config.rank)}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = module_command("headrace.engine.stage", str(os.getpid()))
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, stderr=sys.stderr, pass_fds=(self._outer.fileno(),)
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(msgspec.json.encode(config))
        return process

    def _send(self, frame: bytes) -> None:
        for stage in range(self.stages):
            self._router.send(stage_identity(stage, self._epoch), frame)

    def _receive(self) -> None:
        for _, frames in self._router.receive(time.monotonic()):
            self._came.append(self._events.decode(frames[0]))
        time.sleep(0.002)  # the router has no call that waits
