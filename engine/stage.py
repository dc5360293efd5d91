"""The process of one rank, a shard of a pipeline stage: `python -m headrace.engine.stage PARENT_PID`, StageConfig as
JSON on standard input.

The main thread computes (engine/loop.py); the I/O thread (engine/io_thread.py) owns the sockets.
"""

import logging
import queue
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec
import torch
import zmq

from headrace.core.config import StageConfig
from headrace.core.messages.orders import ShutdownStage, stage_identity
from headrace.core.messages.stage_events import AnyStageEvent, StageFailed, StageLoading, StageReady
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import ConnectionClosed
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.process import (
    CONFIGURATION_MISTAKE,
    GROUP_ENDED_STATUS,
    die_with_parent,
    freeze_loaded,
    keep_freed_memory,
    leave_signals_to_parent,
    raise_descriptor_limit,
)
from headrace.core.runtime.progress import LoadProgress
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.kv.kv_tiers import DISK, HOST, Tier
from headrace.engine.agreement import FollowedPasses, PassSource, VotedPasses
from headrace.engine.collectives.operations import LinkBroken, least
from headrace.engine.device import computation_of, resolve_computation
from headrace.engine.io_thread import Copies, StageIoThread
from headrace.engine.kv.device_pages import DevicePages, pinned_bytes
from headrace.engine.kv.kv_memory import KvMemory
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.copier import open_library, open_tiers
from headrace.engine.layers.exchange import Exchange, make_exchange
from headrace.engine.load_plan import model_spec, plan_rank
from headrace.engine.loop import StageLoop
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.expert_plan import ExpertPlan, plan_experts
from headrace.engine.model.source import resolve_source
from headrace.engine.model.stub import is_stub
from headrace.engine.orders import Inbox, OrderConnection, connect_scheduler
from headrace.engine.outbox import QUEUE_LIMIT, DeviceLinks, DeviceOutbox, EventOutbox, PlanOutbox
from headrace.engine.parallel.groups import Groups, join_groups
from headrace.engine.parallel.layer_split import ranges
from headrace.engine.parallel.offers import Offer, offer
from headrace.engine.parallel.pipeline import PipelineLinks, carrier
from headrace.engine.runner import ModelRunner, Runner
from headrace.engine.stub.runner import StubRunner
from headrace.engine.telemetry.load_report import LoadingReport
from headrace.engine.telemetry.meter import ExpertMeter, Meter
from headrace.engine.telemetry.recorder import Recorder
from headrace.engine.telemetry.speed import measure
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender
from headrace.transfer.protocol.page_store import SourceStore

Context = zmq.Context[zmq.Socket[bytes]]

log = logging.getLogger(__name__)

SHUTDOWN_WAIT_S = 2.0  # after a broken link: for ShutdownStage, before the stage reports the failure itself
ORDERLESS = 2  # tensor-parallel shards, of which a sum is the same in any order
SHARED_WAIT_S = 0.2  # the same where the link was to another server, of which this one's supervisor knows nothing


def run(config: StageConfig) -> int:
    """Load the model, report StageReady and compute until ShutdownStage. Returns the process's exit status.

    Raises ConfigError for a model or sizes that cannot be served, LinkBroken when the ranks cannot form their groups.
    """
    device = torch.device(config.model.device)
    if device.type == "cuda":  # what names no device, such as NCCL's communicators and Triton's kernels, is on this one
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    groups = join_groups(config, device)
    memory = KvMemory(config)
    try:
        return _serve(config, memory, groups)
    finally:
        memory.close()


def _serve(config: StageConfig, memory: KvMemory, groups: Groups) -> int:
    context: Context = zmq.Context()
    clock = SystemClock()
    control = connect_scheduler(context, config.endpoint, stage_identity(config.rank, config.epoch, config.session))
    loading = LoadProgress()
    report = LoadingReport(loading, partial(_send, control), clock, rank=config.rank, epoch=config.epoch)
    with report:  # it has the connection meanwhile
        spec = model_spec(resolve_source(config.model.model), config.model.decoder, config.engine.cache_dir)
        runner, shared = _make_runner(config, spec, memory, groups, loading)
    links = PipelineLinks(
        config.shared_layout,
        config.shared_rank,
        runner.hidden_spec,
        groups.tokens,
        config.credits,
        carrier(groups, runner.hidden_spec.device),
    )
    inbox: Inbox = queue.Queue(QUEUE_LIMIT)
    outbox = EventOutbox(context)
    meter = Meter(config.rank, clock)
    recorder = Recorder(config.rank, meter)
    offered = _offer(config, spec)
    sender, receiver = _data_sockets(config, runner, shared, memory, recorder, context, offered)
    copies = _start_copies(config, runner, context)
    ready = _ready(
        config, runner, shared, memory, sender.port, copies, groups
    )  # measures, before rows per expert are counted
    io_thread = StageIoThread(
        control=control,
        stage=config.rank,
        replica=config.replica,
        sender=sender,
        receiver=receiver,
        meter=meter,
        recorder=recorder,
        inbox=inbox,
        outbox=outbox,
        clock=clock,
        copies=copies,
        progress=runner.progress,
        experts=ExpertMeter(config.layout.place(config.rank).stage, runner.expert_rows),
    )
    freeze_loaded()
    outbox.post(ready)
    io_thread.start()
    # Membership of a stage on another machine notices the end of the group a heartbeat later than a parent process
    # does.
    shutdown_wait_s = config.transfer.peer_timeout_s if config.session else SHUTDOWN_WAIT_S
    device = runner.hidden_spec.device
    reports = _reports(config, groups, outbox, device, meter, inbox)
    loop = StageLoop(config.rank, runner, links, meter, inbox, reports, _passes(config, groups))
    status = _compute(loop, config, reports, shutdown_wait_s)
    if isinstance(reports, DeviceOutbox):
        reports.close()
    io_thread.join(timeout=5)
    outbox.close_writer()
    for each in copies:
        each.copier.join(timeout=5)
        each.outbox.close_writer()
    return status


def _reports(
    config: StageConfig, groups: Groups, outbox: EventOutbox, device: torch.device, meter: Meter, inbox: Inbox
) -> PlanOutbox:
    """Where the compute thread reports to. A link that is found to be broken on the device is put into its inbox."""
    if device.type == "cpu":
        return outbox
    watch = groups.watch
    links = None if watch is None else DeviceLinks(watch, config.stage_timeout_s, inbox.put)
    return DeviceOutbox(outbox, device, meter, links)


def _passes(config: StageConfig, groups: Groups) -> PassSource | None:
    """Agrees with the other servers of its group on each pass; None for a server of its own."""
    if config.member is None:
        return None
    if groups.votes is None:
        assert groups.told is not None, "the shards of a server are a group"
        return FollowedPasses(groups.told, config.member.size)
    device = config.model.device if config.dp_sync == "device" else "cpu"
    return VotedPasses(groups.votes, config.rules, shards=groups.told, device=device)


def _data_sockets(
    config: StageConfig,
    runner: Runner,
    shared: Geometry | None,
    memory: KvMemory,
    recorder: Recorder,
    context: Context,
    offer: Offer,
) -> tuple[Sender, Receiver]:
    """The sender and the receiver of this rank's KV. shared: what it offers to peers."""
    memory.register(runner.pool)
    store = _page_store(config, runner.pool)
    sender = Sender(
        config.transfer,
        stage=config.rank,
        number=offer.number,
        offers=offer.offers,
        geometry=shared or runner.geometry,
        store=store,
        context=context,
        transfers=recorder.transfers,
        transports=memory.transports,
    )
    receiver = Receiver(
        config.transfer,
        stage=config.rank,
        peer_stage=config.layout.replica_ranks(config.replica).index(config.rank),
        geometry=runner.geometry,
        store=store,
        context=context,
        registered_pools=memory.registered_pools,
    )
    return sender, receiver


def _page_store(config: StageConfig, pool: KVPool) -> SourceStore:
    """The pool as KV is sent from it, or received into it."""
    if config.model.device == "cpu":
        return pool
    pinned = pinned_bytes(pool.geometry, config.engine.pass_tokens) if config.role != "colocated" else 0
    return DevicePages(pool, pinned)


def _start_copies(config: StageConfig, runner: Runner, context: Context) -> list[Copies]:
    """The copy threads of the stage's tiers. Raises ConfigError."""
    copies = []
    for open_copier in (open_tiers, open_library):
        outbox = EventOutbox(context)
        copier = open_copier(config, runner.pool, runner.fingerprint, outbox.post)
        if copier is None:
            outbox.close()
            continue
        copier.start()
        copies.append(Copies(copier, outbox))
    return copies


def _ready(
    config: StageConfig,
    runner: Runner,
    shared: Geometry | None,
    memory: KvMemory,
    data_port: int,
    copies: Sequence[Copies],
    groups: Groups,
) -> StageReady:
    slots: dict[Tier, int] = {}
    for each in copies:
        slots |= each.copier.slots
    return StageReady(
        stage=config.rank,
        geometry=runner.geometry,
        offered=None if shared == runner.geometry else () if shared is None else (shared,),
        fingerprint=runner.fingerprint,
        adapters=dict(runner.adapters),
        data_host=config.transfer.host,
        data_port=data_port,
        kv_pages=runner.pool.pages,
        vocab_size=runner.vocab_size,
        host_pages=slots.get(HOST, 0),
        disk_pages=slots.get(DISK, 0),
        epoch=config.epoch,
        cost=_measured_cost(config, runner, groups),
        backends=memory.backends,
        host=memory.host,
        nixl=memory.nixl,
        unreachable_gpus=memory.unreachable_gpus,
        cancels=runner.cancels,
        same_bits=runner.same_bits,
        computation=computation_of(config.model, config.engine),
        reproducible=runner.reproducible and not config.engine.expert_parallel and config.layout.tp <= ORDERLESS,
        memory=memory.pool_memory,
    )


def _send(control: OrderConnection, event: StageLoading) -> None:
    with suppress(ConnectionClosed):  # the scheduler is gone, and this process with it
        control.send(Codec[AnyStageEvent](AnyStageEvent).encode(event))


def _make_runner(
    config: StageConfig, spec: ModelSpec, memory: KvMemory, groups: Groups, loading: LoadProgress
) -> tuple[Runner, Geometry | None]:
    """A warmed-up runner of this rank's layers and heads, and what of its pool is offered to peers. Raises ConfigError,
    and LinkBroken."""
    stage, tp = config.layout.place(config.rank).stage, groups.tp
    experts = plan_experts(
        resolve_computation(config.model, config.engine.cpuinfo), config.engine, config.layout, spec, config.member
    )
    exchanges = _exchanges(config, experts, groups, config.model.device)
    plan = plan_rank(
        config.model,
        config.engine,
        layers=ranges(config.engine.pp_layers)[stage] if config.engine.pp_layers else None,
        tp=tp.size,
        shard=tp.rank,
        experts=len(exchanges[0].own) if exchanges else None,
        exchange_bytes=experts.exchange_bytes if experts else 0,
    )
    runner: Runner
    if is_stub(config.model.model):
        runner = StubRunner(plan, allocate=memory.allocate, exchanges=exchanges, tp=tp)
    else:
        runner = ModelRunner(plan, allocate=memory.allocate, exchanges=exchanges, tp=tp, loading=loading)
    keep_freed_memory()  # after loading, so that the buffers of loading go back to the system
    # Ranks that share experts enter the same exchanges, each replica for as many tokens. Those of several servers may
    # have other pools, and load in other times.
    tokens = runner.pool.pages * runner.geometry.page_size
    if groups.loaded is not None:
        tokens = least(groups.loaded, tokens, "cpu")
    runner.warm_up(tokens)
    return runner, plan.offered


def _exchanges(config: StageConfig, experts: ExpertPlan | None, groups: Groups, device: str) -> tuple[Exchange, ...]:
    """The exchanges of both halves of a pass, or of passes that are not cut; none where experts are not divided."""
    if experts is None:
        return ()
    exchange = make_exchange(experts.way, experts.moe, groups.tp, groups.dp, groups.ep, device)
    if not config.engine.overlap:
        return (exchange,)
    return exchange, make_exchange(experts.way, experts.moe, groups.tp, groups.second_dp, groups.second_ep, device)


def _offer(config: StageConfig, spec: ModelSpec) -> Offer:
    """What this rank offers to peers. Raises ConfigError for a model that cannot be split."""
    if config.layout.tp == 1:
        return Offer(config.rank, offers=True)
    return offer(config.layout, config.rank, spec)


def _measured_cost(config: StageConfig, runner: Runner, groups: Groups) -> tuple[float, float, float] | None:
    """Coefficients of this stage's prefill time (StageReady.cost); None unless the scheduler sizes chunks by time."""
    if not config.measure_tokens:
        return None
    # All ranks of a group have to measure the same lengths, whatever memory each of them has found.
    group = groups.ep if config.engine.expert_parallel else groups.tp
    room = least(group, runner.pool.pages, config.model.device) * runner.geometry.page_size
    limit = min(config.model.max_model_len, room)
    return measure(runner, config.measure_tokens, limit, first=config.layout.place(config.rank).stage == 0)


def _compute(loop: StageLoop, config: StageConfig, outbox: PlanOutbox, shutdown_wait_s: float) -> int:
    """Run the loop to its end; report StageFailed if that is no ShutdownStage. Returns the exit status.

    shutdown_wait_s: after a broken link, seconds for ShutdownStage to arrive before the failure is reported.
    """
    try:
        loop.run()
        return 0
    except LinkBroken as error:
        member = config.member
        # The supervisor knows which stage failed first, unless it was another server's.
        if loop.shutdown_within(shutdown_wait_s if member is None else SHARED_WAIT_S):
            return 0
        if member is not None:
            log.error("%s (%s)", member.lost, error)
            outbox.post(StageFailed(stage=config.rank, message=member.lost, elsewhere=True))
            outbox.post(ShutdownStage(seq=0))
            return GROUP_ENDED_STATUS
        other = "rank" if config.layout.dp * config.layout.tp > 1 else "stage"
        log.error("%s: the link to another %s is broken: %s", config.name, other, error)
        outbox.post(StageFailed(stage=config.rank, message=f"the link to another {other} is broken: {error}"))
    except Exception as error:
        log.exception("%s cannot go on", config.name)
        outbox.post(StageFailed(stage=config.rank, message=f"{type(error).__name__}: {error}"))
    outbox.post(ShutdownStage(seq=0))
    return 1


def main() -> int:
    """Run a stage as the child of the process whose id is the first argument. Returns the exit status:
    CONFIGURATION_MISTAKE, GROUP_ENDED_STATUS where a server that it shares experts with has ended, 1 for another
    failure."""
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_parent()
    raise_descriptor_limit()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=StageConfig)
    configure_logging(config.log_level, config.name, config.log_format)
    try:
        return run(config)
    except LinkBroken as error:
        log.error("%s", error)
        return 1 if config.member is None else GROUP_ENDED_STATUS
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return CONFIGURATION_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
