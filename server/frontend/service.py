"""The front end of one server without HTTP: its parts, joined over one connection to the scheduler."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import httpx

from headrace.core.config import Config, ServerConfig
from headrace.core.messages.frontend import AnyFrontendRequest, Drain, Shutdown, StageLost, WriteRecording
from headrace.core.messages.replies import (
    EngineState,
    KvDigested,
    PrefillState,
    RequestTraced,
    StageDown,
    StageTraced,
    StatusReply,
    Traced,
)
from headrace.core.runtime.background import keep_running
from headrace.core.runtime.clock import Clock, SystemClock
from headrace.core.runtime.liveness import Activity
from headrace.core.types import refusals
from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.core.version import headrace_version
from headrace.server.frontend.generation.audits import PageAuditor, PrefillAudits
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.generation.hedge import Hedges
from headrace.server.frontend.generation.kv_returns import KvReturns, ReturnTaker
from headrace.server.frontend.generation.prefix_fetch import PrefixFetches
from headrace.server.frontend.generation.resume import ResumeFetches
from headrace.server.frontend.generation.runner import GenerationRunner
from headrace.server.frontend.kv_files import KvFileWatch
from headrace.server.frontend.link.control_address import ControlAddress
from headrace.server.frontend.link.scheduler_client import News, SchedulerClient
from headrace.server.frontend.link.scheduler_link import SchedulerLink
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompts, Pieces
from headrace.server.frontend.open_prompts.pieces import LocalPieces
from headrace.server.frontend.open_prompts.remote_pieces import RemotePieces
from headrace.server.frontend.prefix_moves import PrefixMoves
from headrace.server.frontend.request.request_context import TraceSampler
from headrace.server.frontend.served_model import ServedModel
from headrace.server.frontend.status.readiness import Readiness
from headrace.server.frontend.status.recent_events import RecentEvents
from headrace.server.frontend.status.server_status import StatusCollector, StatusQuery
from headrace.server.frontend.status.statistics_log import StatisticsLog
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.telemetry.span_exporter import SpanExporter, SpanSink
from headrace.server.telemetry.spans import RecordSpan
from headrace.server.telemetry.tracer import Tracer
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.text.tokenizer import Tokenizer
from headrace.transfer.sockets.curve_keys import ServerKeys

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0  # for requests that this server has ended to answer their clients


class StageWatch(Protocol):
    """What has to know how the group of stages fares."""

    def stages_ready(self) -> None:
        """All stages are up."""
        ...

    def stage_down(self, down: StageDown) -> None:
        """The scheduler gives a stage up."""
        ...


class Service:
    """Creates the parts that routes use, starts and stops them.

    tokenizer: loaded from the model by start() if not given. prefill_transport: in place of the network, for tests.
    inspect_scheduler: what the scheduler's process does, if that can be known.
    memory: how the memory of each rank is divided, in words.
    stage_watch: is told of the stages, besides the status.
    """

    def __init__(
        self,
        link: SchedulerLink,
        config: Config,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        prefill_transport: httpx.AsyncBaseTransport | None = None,
        inspect_scheduler: Callable[[], Activity | None] = lambda: None,
        memory: Sequence[str] = (),
        stage_watch: StageWatch | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = FrontMetrics()
        self.model = ServedModel(config, tokenizer)
        self.tracer = Tracer(link.send)
        self.prefills = _prefill_pool(config.server, link.send, prefill_transport, self.clock)
        self.siblings = _sibling_pool(config.server, link.send, prefill_transport, self.clock)
        self._spans = SpanExporter(self._open_spans) if config.tracing.endpoint else None
        self.sampler = TraceSampler(config.tracing.sample_ratio) if self._spans is not None else None
        self.record_span: RecordSpan = self._spans.record if self._spans is not None else lambda _span: None
        self._query = StatusQuery(link.send, self.clock)
        self._client = SchedulerClient(
            link,
            self.clock,
            on_news=self._take,
            inspect=inspect_scheduler,
            hang_s=config.scheduler.stage_timeout_s,
        )
        self.record = self._client.write_recording if config.recording.folder else None
        needed = self.prefills if _needs_prefill_server(config.server) else None
        self.readiness = Readiness(self._client, self.model, needed)
        self.forecast = self._client.query_forecast
        self.stats = StatsCollector(self._client, self.readiness, self.metrics, config.engine.page_size)
        self.recent = RecentEvents()
        self.status = StatusCollector(
            config,
            self.readiness,
            self._query,
            self.recent,
            self.prefills or self.siblings,
            self.clock,
            memory=memory,
            instance=lambda: self._client.server_info.instance if self._client.server_info is not None else "",
        )
        self.library = KvFileWatch(config, self._client, link.send) if config.engine.kv_library else None
        self._library_task: asyncio.Task[None] | None = None
        self._stage_watches = (self.status,) if stage_watch is None else (self.status, stage_watch)
        self._statistics_log: asyncio.Task[None] | None = None
        self.control = ControlAddress(self._client, config.transfer.host)
        self.fetches, self.returns, self.taker = self._make_fetches(), self._make_returns(), self._make_taker()
        self.audits = self._make_audits()
        self.auditor = PageAuditor(self._client, config) if config.server.role == "prefill" else None
        self.completions = self._make_completions()
        goes_there = self.prefills is not None and config.server.remote != "never"
        self.open_prompts = OpenPrompts(
            self._make_pieces(),
            self.completions.own,
            self.clock,
            most=config.server.open_prompts,
            seconds=config.server.open_s,
            page_size=config.engine.page_size,
            prefix_cache=config.scheduler.prefix_cache or goes_there,
        )
        self.metrics.include(self.open_prompts.samples)

    async def start(self) -> None:
        """Connect to the scheduler, load the tokenizer, find the prefill servers. Raises ConfigError."""
        self._client.start()
        await self.model.load()
        self.metrics.set_build(headrace_version(), self.config.server.role, self.model.name)
        if self._spans is not None:
            self._spans.start()
            self.metrics.include(self._spans.statistics)
        for pool in (self.prefills, self.siblings):
            if pool is not None:
                pool.start()
        if self.library is not None:
            self.metrics.include(self.library.statistics)
            self._library_task = asyncio.create_task(keep_running("the look for KV files", self.library.run))
        statistics_log = StatisticsLog(self.stats.snapshot, self.clock)
        self._statistics_log = asyncio.create_task(keep_running("the log of statistics", statistics_log.run))

    async def stop(self) -> None:
        """End every task. Requests that are still open fail. Spans that are left are sent, for FLUSH_S at most."""
        for task in (self._statistics_log, self._library_task):
            if task is not None:
                task.cancel()
        await self.open_prompts.close()
        for part in (self.fetches, self.returns, self.taker, self.audits, self.prefills, self.siblings):
            if part is not None:
                await part.stop()
        await self._client.stop()
        await self.model.close()
        if self._spans is not None and self._spans.started:
            await asyncio.to_thread(self._spans.stop)

    async def drain(
        self, timeout_s: float, grace_s: float = 0.0, on_grace_over: Callable[[], None] = lambda: None
    ) -> None:
        """Be not ready; after grace_s refuse new requests and wait for the open ones, for timeout_s at most. Those that
        are left then fail with 503, at the peer, too.

        Without a grace nothing that comes is served, and with one all of it is; on_grace_over is called between the
        two."""
        if grace_s and self.readiness.refusal() is None:
            self.readiness.start_leaving()
            await asyncio.sleep(grace_s)
            on_grace_over()
        self.readiness.start_draining()
        for part in (self.returns, self.taker):
            if part is not None:
                await part.stop()
        self._client.post(Drain())
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.wait_drained()
        except TimeoutError:
            requests, held = self._client.open_calls, self._client.held_calls
            log.warning("%d requests and %d held prompts are left after %.0f s; ending them", requests, held, timeout_s)
            await self.end_requests()

    async def end_requests(self) -> None:
        """Fail all requests that are open, and those that come, with 503; wait until the clients were answered. Peers
        are told."""
        self.readiness.start_draining()
        self._client.end_all(refusals.STOPPING.error())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._client.wait_idle(), ABORT_TIMEOUT_S)

    def shut_down(self) -> None:
        """End the scheduler and its stages; unfinished requests fail, peers are told."""
        self._client.post(Shutdown())

    def _make_fetches(self) -> PrefixFetches | None:
        if self.siblings is None or not self.config.server.siblings:
            return None
        return PrefixFetches(self._client, self.siblings, self._make_moves(self.siblings), self.clock)

    def _make_moves(self, pool: PrefillPool) -> PrefixMoves:
        page_size = self.config.engine.page_size
        return PrefixMoves(self._client, pool, self.metrics, self.clock, page_size, self.record_span)

    def _make_pieces(self) -> Pieces:
        """Of open prompts."""
        if self.prefills is None or self.config.server.remote == "never":
            return LocalPieces(self._client)
        caches = self.config.scheduler.prefix_cache
        return RemotePieces(self.prefills, self._make_moves(self.prefills) if caches else None)

    def _make_returns(self) -> KvReturns | None:
        config = self.config
        if self.prefills is None or not config.server.kv_return:
            return None
        return KvReturns(self._client, self.prefills, self.metrics, self.clock, config.engine.page_size)

    def _make_taker(self) -> ReturnTaker | None:
        config = self.config
        if self.siblings is None or not config.server.accept_returns:
            return None
        return ReturnTaker(self._client, self.siblings, self.metrics, self.clock, config.engine.page_size)

    def _make_audits(self) -> PrefillAudits | None:
        rate = self.config.server.audit_rate
        return PrefillAudits(self.prefills, self.metrics, rate) if self.prefills is not None and rate else None

    def _make_resumes(self) -> ResumeFetches | None:
        config = self.config
        if self.siblings is None or not (config.server.accept_returns and config.scheduler.prefix_cache):
            return None
        return ResumeFetches(self._client, self.siblings, self.metrics, self.clock, config.engine.page_size)

    def _make_hedges(self) -> Hedges | None:
        factor = self.config.server.hedge
        return None if self.prefills is None or not factor else Hedges(self.prefills, self.metrics, factor)

    def _make_completions(self) -> Completions:
        runner = GenerationRunner(
            self._client,
            self.model,
            self.prefills,
            self.metrics,
            self.clock,
            local=self.config.server.fallback == "local",
            remote=self.config.server.remote,
            fetches=self.fetches,
            returns=self.returns,
            audits=self.audits,
            resumes=self._make_resumes(),
            hedges=self._make_hedges(),
            record_span=self.record_span,
        )
        return Completions(
            self._client,
            runner,
            self.readiness,
            self.prefills,
            self.metrics,
            self.clock,
            max_open=self.config.scheduler.max_queued_requests,
            hidden=self.model.hidden,
            adapters=self.model.adapters,
            share_prefixes=self.config.server.share_prefixes,
            fetches=self.fetches,
            taker=self.taker,
            auditor=self.auditor,
        )

    def _open_spans(self) -> SpanSink:
        """Called in the exporter's thread."""
        from headrace.server.telemetry.otlp_sink import OtlpSink  # needs the extra "tracing"

        return OtlpSink(self.config.tracing, self.config.server.role, headrace_version(), self.model.name)

    def _take(self, news: News) -> None:
        """Tell the parts that the news of the scheduler concern."""
        match news:
            case EngineState():
                for watch in self._stage_watches if news.ready else ():
                    watch.stages_ready()
            case StageDown():
                for watch in self._stage_watches:
                    watch.stage_down(news)
            case PrefillState():
                for pool in (self.prefills, self.siblings):
                    if pool is not None:
                        pool.update(news)
                self.status.prefill(news)
            case KvDigested():
                for part in (self.audits, self.auditor):
                    if part is not None:
                        part.take(news)
            case Traced() | StageTraced():
                self.tracer.take(news)
            case RequestTraced():
                self.record_span(news)
            case StatusReply():
                self._query.take(news)

    def record_by_signal(self) -> None:
        """Have what the flight recorder has written into a file; the log says which."""
        self._client.post(WriteRecording(token=0, reason="signal"))

    async def stage_lost(self, stage: int, message: str) -> None:
        """Report to the scheduler that the process of a stage has ended."""
        self._client.post(StageLost(stage=stage, message=message))


def _prefill_pool(
    server: ServerConfig,
    post: Callable[[AnyFrontendRequest], None],
    transport: httpx.AsyncBaseTransport | None,
    clock: Clock,
) -> PrefillPool | None:
    """The prefill servers of a decode server."""
    if server.role != "decode":
        return None
    return PrefillPool(
        server.prefill,
        server.prefill_api_key,
        post,
        transport=transport,
        rules=allowed_prefills(server.prefill, server.allow_prefill),
        keys=ServerKeys(server.curve_server_keys),
        routing=server.routing,
        compares=server.remote == "cost" or server.hedge > 0,
        clock=clock,
    )


def _sibling_pool(
    server: ServerConfig,
    post: Callable[[AnyFrontendRequest], None],
    transport: httpx.AsyncBaseTransport | None,
    clock: Clock,
) -> PrefillPool | None:
    """The servers that a prefill server fetches prefixes from: its siblings, and decode servers that return KV."""
    if server.role != "prefill" or not server.fetches_kv:
        return None
    return PrefillPool(
        server.siblings,
        server.prefill_api_key,
        post,
        transport=transport,
        rules=allowed_prefills(server.siblings, server.accept_returns),
        keys=ServerKeys(server.curve_server_keys),
        routing="least-load",
        clock=clock,
    )


def _needs_prefill_server(server: ServerConfig) -> bool:
    """False if prompts are or can be computed here, or if requests name all prefill servers."""
    return server.fallback != "local" and server.remote != "never" and bool(server.prefill or not server.allow_prefill)
