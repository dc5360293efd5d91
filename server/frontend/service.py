"""What the routes call: the joint of the scheduler's client, the tokenizer, the prefill pool and the counters."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import httpx

from headrace.core.config import Config
from headrace.core.messages.frontend import (
    Drain,
    EngineState,
    Progress,
    RefuseTicket,
    ReleaseTicket,
    Shutdown,
    StageDown,
    StageLost,
    Tokens,
)
from headrace.core.runtime.clock import Clock, SystemClock, wall_offset
from headrace.core.stats import Sample, Stats
from headrace.core.types.allow_list import allowed_prefills
from headrace.core.types.errors import DRAINING, NOT_READY, QUEUE_FULL, ErrorInfo, HeadraceError, unavailable
from headrace.server.frontend.generation import Delta, Emit, Generation, GenerationResult, Job
from headrace.server.frontend.scheduler_client import SchedulerClient
from headrace.server.frontend.scheduler_link import SchedulerLink
from headrace.server.telemetry.metrics import FrontMetrics
from headrace.server.telemetry.trace_report import trace_json
from headrace.server.telemetry.tracer import Tracer
from headrace.server.tokenizer.service import TokenService
from headrace.server.tokenizer.tokenizer import Tokenizer, load_tokenizer
from headrace.server.upstream.handoff_params import KvSource
from headrace.server.upstream.prefill_pool import NO_PREFILL_SERVER, PrefillPool, PrefillServer
from headrace.server.version import headrace_version
from headrace.transfer.sockets.curve_keys import ServerKeys

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.0
LAST_WORDS_S = 2.0


class Service:
    """One server's front end without HTTP. config is resolved: max_model_len and vocab_size are known.

    tokenizer: loaded from the model by start() when not given. prefill_transport: in place of the network.
    """

    def __init__(
        self,
        link: SchedulerLink,
        config: Config,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        prefill_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = FrontMetrics()
        self.draining = False
        self._client = SchedulerClient(link, self.clock)
        self._tracer = Tracer(self._client.post)
        self._client.on_trace = self._tracer.take
        self._tokenizer = tokenizer
        self._tokens: TokenService | None = None
        self._generation: Generation | None = None
        self._prefills: PrefillPool | None = None
        server = config.server
        if server.role == "decode":
            self._prefills = PrefillPool(
                server.prefill,
                server.prefill_api_key,
                self._client.post,
                transport=prefill_transport,
                rules=allowed_prefills(server.prefill, server.allow_prefill),
                keys=ServerKeys(server.curve_server_keys),
            )
            self._client.on_prefill = self._prefills.update

    async def start(self) -> None:
        """Talk to the scheduler, load the tokenizer, find the prefill servers. Raises ConfigError."""
        self._client.start()
        tokenizer = self._tokenizer
        if tokenizer is None:
            tokenizer = await asyncio.to_thread(_warm_tokenizer, self.config.model.model, self.config.server.cache_dir)
        self._tokens = TokenService(tokenizer)
        local = self.config.server.fallback == "local"
        self._generation = Generation(self._client, self._tokens, self._prefills, local=local)
        self.metrics.build(headrace_version(), self.config.server.role, self.model_name)
        if self._prefills is not None:
            self._prefills.start()

    async def stage_lost(self, stage: int, message: str) -> None:
        """The supervisor saw a stage process end."""
        self._client.post(StageLost(stage=stage, message=message))

    def watch_stages(self, on_ready: Callable[[], None], on_down: Callable[[StageDown], None]) -> None:
        """Whom to tell when all stages are up, and when the scheduler finds one silent or failed."""
        self._client.on_stages_ready = on_ready
        self._client.on_stage_down = on_down

    def shut_down(self) -> None:
        """Have the scheduler and its stages end; unfinished requests fail, peers are told."""
        self._client.post(Shutdown())

    async def stop(self) -> None:
        """End every task. Requests that are still open fail."""
        if self._prefills is not None:
            await self._prefills.stop()
        await self._client.stop()
        if self._tokens is not None:
            self._tokens.close()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work and wait for what is open; what is left at the deadline fails with 503, at both sides."""
        self.draining = True
        self._client.post(Drain())
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.wait_drained()
        except TimeoutError:
            log.warning("%d requests are still open after %.0f s; ending them", self._client.open_calls, timeout_s)
            self._client.abort_all(ErrorInfo(code=DRAINING, message="the server is stopping", status=503))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._client.wait_idle(), LAST_WORDS_S)

    async def wait_ready(self) -> None:
        """Until the engine has loaded. A decode server may then still lack a prefill server."""
        await self._client.wait_for(lambda: self._client.engine is not None and self._client.engine.ready)

    async def next_engine_news(self, told: str) -> str:
        """Whether the stages are up, or why not, in words; waits until these are others than the ones told before."""
        await self._client.wait_for(lambda: self._engine_news() not in ("", told))
        return self._engine_news()

    def _engine_news(self) -> str:
        engine = self._client.engine
        if engine is None:
            return ""
        return "all stages are up" if engine.ready else engine.reason

    @property
    def model_name(self) -> str:
        return self.config.server.served_model_name or self.config.model.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may call the model."""
        return tuple(dict.fromkeys((self.model_name, self.config.model.model)))

    @property
    def engine(self) -> EngineState | None:
        """What the scheduler last told of itself."""
        return self._client.engine

    @property
    def tokens(self) -> TokenService:
        """Raises HeadraceError (503) while the tokenizer is being loaded."""
        if self._tokens is None:
            raise unavailable("the server is loading", code=NOT_READY)
        return self._tokens

    def prefill_servers(self) -> list[PrefillServer]:
        """A decode server's prefill servers, and what is known of them."""
        return self._prefills.states() if self._prefills is not None else []

    @property
    def open_requests(self) -> int:
        """Requests between submission and their end."""
        return self._client.open_calls

    @property
    def max_model_len(self) -> int:
        return self.config.scheduler.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.config.scheduler.vocab_size or self.tokens.tokenizer.vocab_size

    def unhealthy(self) -> str | None:
        """Why the server counts as dead, or None."""
        return self._client.problem()

    def not_ready(self) -> ErrorInfo | None:
        """Why a request would be refused now, or None. A decode server all of whose prefill servers are named by
        requests is ready without any."""
        server = self.config.server
        if (problem := self._engine_problem()) is not None:
            return problem
        needed = server.fallback != "local" and (server.prefill or not server.allow_prefill)
        if self._prefills is not None and needed and (why := self._prefills.problem()):
            return _unready(NO_PREFILL_SERVER, why)
        return None

    def _engine_problem(self) -> ErrorInfo | None:
        engine = self._client.engine
        if problem := self.unhealthy():
            return _unready("scheduler_silent", problem)
        if self.draining:
            return _unready(DRAINING, "the server is draining")
        if engine is None or self._generation is None:
            return _unready(NOT_READY, "the server is loading")
        if not engine.ready:
            return _unready(NOT_READY, engine.reason or "the engine is loading")
        return None

    def admit(self, job: Job) -> Generation:
        """The way to run a job. Raises HeadraceError (503, 429) when it may not start now; whoever waits for its ticket
        is told."""
        try:
            return self._admit(job)
        except HeadraceError as error:
            self.refuse([job.ticket] if job.ticket else [], error.info)
            self.release([job.origin] if job.origin else [], error.info.message)
            raise

    def refuse(self, tickets: Iterable[str], error: ErrorInfo) -> None:
        """Prompts under these tickets are not going to be computed; the peers that come for them are told why."""
        for ticket in tickets:
            self._client.post(RefuseTicket(ticket=ticket, error=error))

    def release(self, origins: Iterable[KvSource], reason: str) -> None:
        """Nobody is going to fetch what comes from there; the prefill servers that are known are told."""
        for origin in origins:
            server = self._prefills.find(origin.address) if self._prefills and origin.address else None
            if server is not None:
                self._client.post(ReleaseTicket(prefill=server.url, ticket=origin.ticket, reason=reason))

    def _admit(self, job: Job) -> Generation:
        problem = self.not_ready() if job.origin is None else self._engine_problem()
        if problem is not None:
            raise HeadraceError(problem)
        limit = self.config.scheduler.max_queued_requests
        if self._client.open_calls >= limit:
            message = f"{limit} requests are open, which is the limit"
            raise HeadraceError(ErrorInfo(code=QUEUE_FULL, message=message, status=429, retry_after_s=1.0))
        assert self._generation is not None
        return self._generation

    async def complete(self, job: Job, emit: Emit) -> GenerationResult:
        """Continue a prompt here. Raises HeadraceError; cancelling it cancels the request."""
        return await self.admit(job).complete(job, self._timed(emit))

    async def prefill(self, job: Job, emit: Emit) -> tuple[Tokens, GenerationResult]:
        """Compute a prompt and hand it over. Raises HeadraceError; cancelling it cancels the request."""
        started = self.clock.now()
        first, result = await self.admit(job).prefill(job, emit)
        self.metrics.first_token(self.clock.now() - started - result.timing.transfer_s)
        return first, result

    def cancel(self, rid: str) -> bool:
        """Take a request back; False when there is none of this name."""
        return self._client.cancel(rid)

    async def stats(self) -> list[Stats]:
        """Snapshots of the scheduler's side and of the front end."""
        theirs = await self._client.query_stats(STATS_TIMEOUT_S) if self._client.problem() is None else Stats()
        ready = Sample("ready", float(self.not_ready() is None))
        mine = Stats((ready, Sample("open_requests", self.open_requests)))
        return [theirs, self.metrics.statistics(), mine]

    async def trace(self, seconds: float) -> bytes:
        """What this server does in the next seconds, in Chrome's trace event format. Raises HeadraceError (409, 503);
        cancelling it ends the recording."""
        recording = await self._tracer.record(seconds)
        about = {"version": headrace_version(), "role": self.config.server.role, "model": self.model_name}
        # Thousands of spans take a while to draw, and this loop has others to serve.
        return await asyncio.to_thread(trace_json, recording, wall_offset(), about)

    def _timed(self, emit: Emit) -> Emit:
        """Note when the first token passes."""
        started: float | None = self.clock.now()

        async def watch(event: Progress | Delta) -> None:
            nonlocal started
            if started is not None and isinstance(event, Delta):
                self.metrics.first_token(self.clock.now() - started)
                started = None
            await emit(event)

        return watch


def _warm_tokenizer(model: str, cache_dir: str) -> Tokenizer:
    tokenizer = load_tokenizer(model, cache_dir)
    tokenizer.warm_up()
    return tokenizer


def _unready(code: str, message: str) -> ErrorInfo:
    return ErrorInfo(code=code, message=message, status=503, retry_after_s=1.0)
