"""A stage process: `python -m headrace.engine.stage PARENT`, configuration as JSON on standard input.

The main thread computes (engine/loop.py); the I/O thread (engine/io_thread.py) owns the sockets.
"""

import logging
import queue
import sys
from collections.abc import Callable

import msgspec
import torch
import zmq

from headrace.core.config import StageConfig
from headrace.core.messages.orders import AnyOrder, ShutdownStage, stage_identity
from headrace.core.messages.stage_events import StageFailed, StageReady
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.process import die_with_parent, freeze_loaded, keep_freed_memory
from headrace.core.types.errors import ConfigError
from headrace.engine.io_thread import QUEUE_LIMIT, EventOutbox, StageIoThread
from headrace.engine.kv.kv_memory import KvMemory
from headrace.engine.loop import StageLoop
from headrace.engine.model.stub import is_stub
from headrace.engine.order_connection import dial_scheduler
from headrace.engine.parallel.layer_split import ranges
from headrace.engine.parallel.pipeline import LinkBroken, PipelineLinks, join_group
from headrace.engine.runner import ModelRunner, Runner
from headrace.engine.stub_runner import StubRunner
from headrace.engine.telemetry.meter import Meter
from headrace.engine.telemetry.recorder import Recorder
from headrace.engine.telemetry.speed import measure
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender

Context = zmq.Context[zmq.Socket[bytes]]

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0


def run(config: StageConfig) -> int:
    """Load, announce readiness, compute. Returns the exit status. Raises ConfigError, and LinkBroken when the stages do
    not find together."""
    if config.stages > 1:
        join_group(config, torch.device(config.model.device))
    sharing = KvMemory(config)
    try:
        return _serve(config, sharing)
    finally:
        sharing.close()


def _serve(config: StageConfig, sharing: KvMemory) -> int:
    runner = _runner(config, sharing)
    links = PipelineLinks(config.stage, config.stages, runner.hidden, config.stage_timeout_s)
    context: Context = zmq.Context()
    inbox: queue.Queue[AnyOrder] = queue.Queue(QUEUE_LIMIT)
    outbox = EventOutbox(context)
    clock = SystemClock()
    meter = Meter(config.stage, clock)
    recorder = Recorder(config.stage, meter)
    sender, receiver = _ends(config, runner, sharing, recorder, context)
    wire = StageIoThread(
        control=dial_scheduler(
            context,
            config.endpoint,
            stage_identity(config.stage, config.epoch, config.session),
        ),
        stage=config.stage,
        sender=sender,
        receiver=receiver,
        meter=meter,
        recorder=recorder,
        inbox=inbox,
        outbox=outbox,
        clock=clock,
    )
    freeze_loaded()
    outbox.post(_ready(config, runner, sharing, sender.port))
    wire.start()
    # A stage on another machine is told by its membership, which notices an end a heartbeat later than a parent does.
    patience_s = config.transfer.peer_timeout_s if config.session else LAST_WORDS_S
    loop = StageLoop(config.stage, runner, links, meter, inbox, outbox)
    status = _compute(loop, config.stage, outbox, patience_s)
    wire.join(timeout=5)
    outbox.close_writer()
    return status


def _ends(
    config: StageConfig, runner: Runner, sharing: KvMemory, recorder: Recorder, context: Context
) -> tuple[Sender, Receiver]:
    """This stage's ends of data connections, in both directions."""
    sender = Sender(
        config.transfer,
        stage=config.stage,
        geometry=runner.geometry,
        store=runner.pool,
        context=context,
        transfers=recorder.transfers,
        reaches=sharing.reaches,
    )
    receiver = Receiver(
        config.transfer,
        stage=config.stage,
        geometry=runner.geometry,
        store=runner.pool,
        context=context,
        exposures=sharing.exposures,
    )
    return sender, receiver


def _ready(config: StageConfig, runner: Runner, sharing: KvMemory, data_port: int) -> StageReady:
    return StageReady(
        stage=config.stage,
        geometry=runner.geometry,
        fingerprint=runner.fingerprint,
        data_host=config.transfer.host,
        data_port=data_port,
        kv_pages=runner.pool.pages,
        vocab_size=runner.vocab_size,
        epoch=config.epoch,
        cost=_cost(config, runner),
        backends=sharing.backends,
        host=sharing.host,
        nixl=sharing.nixl,
        memory=sharing.memory,
    )


def _runner(config: StageConfig, sharing: KvMemory) -> Runner:
    """With the layers of this stage, warmed up."""
    layers = ranges(config.engine.pp_layers)[config.stage] if config.engine.pp_layers else None
    make: Callable[..., Runner] = StubRunner if is_stub(config.model.model) else ModelRunner
    runner = make(config.model, config.engine, layer_range=layers, allocate=sharing.allocate)
    keep_freed_memory()  # not before the weights are there: what was theirs on the way is to be given back
    runner.warm_up()
    return runner


def _cost(config: StageConfig, runner: Runner) -> tuple[float, float, float] | None:
    """How long a prompt of some length takes here, where the scheduler wants to know."""
    if not config.measure_tokens:
        return None
    return measure(runner, config.measure_tokens, config.model.max_model_len, first=config.stage == 0)


def _compute(loop: StageLoop, stage: int, outbox: EventOutbox, patience_s: float) -> int:
    """Run the loop to its end, and say why when that is no ShutdownStage. Returns the exit status. patience_s: for
    whoever ends a broken group, before a stage complains of it."""
    try:
        loop.run()
        return 0
    except LinkBroken as error:
        if loop.halts_within(patience_s):  # whoever watches the group knows better which stage was the first
            return 0
        log.error("stage %d: a link to another stage has broken: %s", stage, error)
        outbox.post(StageFailed(stage=stage, message=f"a link to another stage has broken: {error}"))
    except Exception as error:
        log.exception("stage %d cannot go on", stage)
        outbox.post(StageFailed(stage=stage, message=f"{type(error).__name__}: {error}"))
    outbox.post(ShutdownStage(seq=0))
    return 1


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=StageConfig)
    logging.basicConfig(
        level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s stage {config.stage}: %(message)s"
    )
    try:
        return run(config)
    except LinkBroken as error:
        log.error("%s", error)
        return 1
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
