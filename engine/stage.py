"""A stage process: `python -m engine.stage`, configuration as JSON on standard input.

The main thread computes; the I/O thread (engine/wire.py) owns the sockets.

    inbox ──► Forward: run the model, report PlanDone
              Release: forget the request
              Halt:    end
"""

import logging
import queue
import sys
import time

import msgspec
import zmq

from core.clock import SystemClock
from core.config import StageConfig
from core.errors import ConfigError
from core.orders import Forward, Halt, OrderMessage, PlanDone, Release, StageFailed, StageReady
from core.process import die_with_parent
from engine.runner import ModelRunner, Runner
from engine.wire import QUEUE_LIMIT, Outbox, StageWire
from transfer.receiver import Receiver
from transfer.sender import Sender

log = logging.getLogger(__name__)


def compute(runner: Runner, stage: int, inbox: "queue.Queue[OrderMessage]", outbox: Outbox) -> None:
    """Execute the stream until Halt."""
    while True:
        order = inbox.get()
        match order:
            case Forward():
                started = time.perf_counter()
                samples, prompt_logprobs = runner.execute(order.rows)
                outbox.post(
                    PlanDone(
                        stage=stage,
                        seq=order.seq,
                        duration_s=time.perf_counter() - started,
                        samples=tuple(samples),
                        prompt_logprobs=tuple(prompt_logprobs),
                    )
                )
            case Release():
                runner.release(order.request)
            case _:
                return


def run(config: StageConfig) -> int:
    """Load, announce readiness, compute. Returns the exit status."""
    runner = ModelRunner(config.model, config.engine)
    runner.warm_up()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: queue.Queue[OrderMessage] = queue.Queue(QUEUE_LIMIT)
    outbox = Outbox(context)
    sender = Sender(config.transfer, stage=config.stage, geometry=runner.geometry, store=runner.pool, context=context)
    receiver = Receiver(
        config.transfer, stage=config.stage, geometry=runner.geometry, store=runner.pool, context=context
    )
    wire = StageWire(
        context=context,
        endpoint=config.endpoint,
        stage=config.stage,
        sender=sender,
        receiver=receiver,
        inbox=inbox,
        outbox=outbox,
        clock=SystemClock(),
    )
    outbox.post(
        StageReady(
            stage=config.stage,
            geometry=runner.geometry,
            fingerprint=runner.fingerprint,
            data_port=sender.port,
            kv_pages=runner.pool.pages,
            vocab_size=runner.vocab_size,
        )
    )
    wire.start()
    status = 0
    try:
        compute(runner, config.stage, inbox, outbox)
    except Exception as error:
        log.exception("stage %d cannot go on", config.stage)
        outbox.post(StageFailed(stage=config.stage, message=f"{type(error).__name__}: {error}"))
        outbox.post(Halt(seq=0))
        status = 1
    wire.join(timeout=5)
    outbox.close_writer()
    return status


def main() -> int:
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=StageConfig)
    logging.basicConfig(
        level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s stage {config.stage}: %(message)s"
    )
    try:
        return run(config)
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
