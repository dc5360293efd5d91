"""The scheduler process: `python -m server.scheduler_process`, configuration as JSON on standard input.

Joins the pure scheduler with its four ports: the front end, the stages, the desk where decode peers call, and the
dialer that calls prefill servers' desks.
"""

import logging
import secrets
import sys

import msgspec
import zmq

from core.clock import SystemClock
from core.config import Role, SchedulerConfig, TransferConfig
from core.orders import StageReady
from core.process import die_with_parent
from scheduler.loop import SchedulerLoop
from scheduler.scheduler import Event, Scheduler
from server.channels import FrontChannel, StageChannel
from transfer.desk import Desk
from transfer.dialer import Dialer

log = logging.getLogger(__name__)


class SchedulerProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler process is told at its start. The endpoints are local sockets it binds."""

    role: Role
    front_endpoint: str
    stage_endpoint: str
    scheduler: SchedulerConfig
    transfer: TransferConfig
    log_level: str = "info"


def run(config: SchedulerProcessConfig) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    instance = secrets.token_hex(16)
    desk = Desk(config.transfer, instance=instance, context=context) if config.role == "prefill" else None
    dialer = Dialer(config.transfer, instance=instance, context=context) if config.role == "decode" else None
    front = FrontChannel(context, config.front_endpoint, desk.port if desk else 0, instance)
    beat_s = config.transfer.peer_timeout_s / 3
    stages = StageChannel(
        context,
        config.stage_endpoint,
        config.scheduler.stages,
        beat_s=beat_s,
        silence_s=config.transfer.peer_timeout_s,
    )
    front.more_stats = [source for source in (stages, desk, dialer) if source is not None]
    ready: dict[int, StageReady] = {}

    def introduce(event: Event) -> None:
        """Once every stage has told its geometry, the desk and the dialer know who we are."""
        if isinstance(event, StageReady):
            ready[event.stage] = event
            if len(ready) == config.scheduler.stages:
                front.stages = tuple(ready[stage] for stage in sorted(ready))
                for port in (desk, dialer):
                    if port is not None:
                        port.ready(front.stages, max_model_len=config.scheduler.max_model_len)

    loop = SchedulerLoop(
        Scheduler(config.scheduler),
        front=front,
        stages=stages,
        desk=desk,
        dialer=dialer,
        clock=SystemClock(),
        observe=introduce,
    )
    try:
        loop.run()
    finally:
        for port in (front, stages, desk, dialer):
            if port is not None:
                port.close()
        context.term()


def main() -> int:
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=SchedulerProcessConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s scheduler: %(message)s")
    run(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
