"""A worker of NVIDIA Dynamo: its unified backend's engine, in front of a Headrace server or gateway.

frontend ─┬─► prefill worker ─► prefill server: POST /generate ─► kv_transfer_params, by way of the frontend, to the
          └─► decode worker ──► decode server:  POST /generate, which fetches the KV and streams tokens

Dynamo's runtime owns the process: signals, registration, the drain of requests that are open.
"""

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run as run_backend
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from headrace.core.runtime.background import keep_running
from headrace.core.types.errors import ConfigError, ErrorInfo, HeadraceError
from headrace.integrations.dynamo import request as requests
from headrace.integrations.dynamo.answer import Chunk, chunk, gateway_chunk, prefill_chunk
from headrace.integrations.dynamo.cache_relay import CacheRelay, Publisher
from headrace.integrations.dynamo.options import USAGE, WorkerSettings, add_flags, settings_of
from headrace.integrations.dynamo.presence import Presence
from headrace.integrations.dynamo.server import Description, Server, tokenizer_source

log = logging.getLogger(__name__)
MODES = {"prefill": DisaggregationMode.PREFILL, "decode": DisaggregationMode.DECODE}
LOAD_S = 1.0
GENERATE, COMPLETION = "/generate", "/v1/completions"
Fields = Mapping[str, Any]


class HeadraceEngine(LLMEngine):
    """Answers Dynamo's requests by asking one server."""

    def __init__(self, settings: WorkerSettings, server: Server, description: Description, tokenizer: str) -> None:
        """tokenizer: folder or hub id."""
        self._settings = settings
        self._server = server
        self._description = description
        self._tokenizer = tokenizer
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshots: Any = None  # Dynamo's SnapshotPublisher
        self._open = 0  # requests
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["HeadraceEngine", WorkerConfig]:
        """See LLMEngine; the flags are those of `headrace dynamo`."""
        parser = argparse.ArgumentParser(usage=USAGE)
        add_flags(parser)
        return await cls.before(settings_of(parser.parse_args(argv)))

    @classmethod
    async def before(cls, settings: WorkerSettings) -> tuple["HeadraceEngine", WorkerConfig]:
        """The engine before a server, when that serves. Raises ConfigError for one that cannot be registered."""
        logging.getLogger("httpx").setLevel(logging.WARNING)  # Dynamo's logging has all loggers at INFO
        server = Server(settings)
        try:
            description = await server.wait(settings.wait_s, lambda text: print(f"headrace: {text}", flush=True))
            _check_role(settings, description)
            tokenizer = tokenizer_source(settings.model_path, description)
        except BaseException:
            await server.close()
            raise
        return cls(settings, server, description, tokenizer), _config(settings, description, tokenizer)

    async def start(self, worker_id: int) -> EngineConfig:
        """See LLMEngine."""
        found = self._description
        return EngineConfig(
            model=self._tokenizer,
            served_model_name=found.model,
            llm=LlmRegistration(
                context_length=found.context_length or None,
                kv_cache_block_size=self._settings.block_size or found.page_size or None,
                total_kv_blocks=found.pages or None,
                data_parallel_size=found.replicas if found.replicas > 1 else None,
            ),
        )

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Begin to look whether the server serves."""
        presence = Presence(self._server, self._description, endpoint, _end)
        self._tasks.append(asyncio.create_task(keep_running("the look at the server", presence.watch)))
        if self._snapshots is not None:
            self._tasks.append(asyncio.create_task(keep_running("the look at the load", self._publish_load)))

    async def kv_event_sources(self) -> list[PushSource]:
        """The publishers that are wanted, by which the router learns what the prefix cache holds; none without
        --kv-events-port."""
        if self._description.kind == "gateway" or (events := await self._server.kv_events()) is None:
            return []
        loop, ranks, publishers = asyncio.get_running_loop(), range(self._description.replicas), dict[int, Publisher]()

        def follow() -> None:
            relay = CacheRelay(*events, [publishers[rank] for rank in ranks])
            self._tasks.append(loop.create_task(keep_running("following the KV events", relay.run)))

        def ready(rank: int, publisher: Publisher) -> None:
            publishers[rank] = publisher
            if len(publishers) == len(ranks):
                loop.call_soon_threadsafe(follow)

        return [PushSource(on_ready=partial(ready, rank), dp_rank=rank) for rank in ranks]

    def component_metrics_dp_ranks(self) -> list[int]:
        """The rank whose load is told; none of a gateway, and of several replicas, whose loads are one."""
        return [0] if self._description.kind != "gateway" and self._description.replicas == 1 else []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """See LLMEngine."""
        self._snapshots = publisher

    async def _publish_load(self) -> None:
        """Tell Dynamo's router and metrics what the server's KV pages are used for, every second."""
        while True:
            await asyncio.sleep(LOAD_S)
            with suppress(HeadraceError):  # while it is gone
                load = await self._server.load()
                share = load.used / load.pages if load.pages else 0.0
                self._snapshots.publish(0, ComponentSnapshot(load.used, load.pages, share, 0, load.hit_rate))

    async def health_check_payload(self) -> dict[str, Any]:
        """What the runtime asks when nothing else has been asked for a while: generate() has a token computed."""
        return dict(build_health_check_payload(bos_token_id=1))

    async def is_quiescent(self) -> bool:
        """KV is held by the server, not here: the worker may go."""
        return True

    async def cleanup(self) -> None:
        """See LLMEngine. Dynamo stops what is open when this has returned, so open requests end before; its own limit,
        DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT, ends the wait."""
        for task in self._tasks:
            task.cancel()
        await self._idle.wait()
        await self._server.close()

    async def generate(self, request: Fields, context: Any) -> AsyncGenerator[Chunk, None]:
        """The chunks of one request; ends it at the server when the frontend gives it up. Raises what Dynamo makes of
        an error."""
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        self._open += 1
        self._idle.clear()
        try:
            async with aclosing(self._chunks(request, _headers(context))) as chunks:
                async for each in _until(stopped, chunks):
                    yield each
            if stopped.done():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except HeadraceError as error:
            raise as_dynamo_has_it(error.info) from error
        finally:
            stopped.cancel()
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _chunks(self, request: Fields, headers: Mapping[str, str]) -> AsyncGenerator[Chunk, None]:
        """Raises HeadraceError."""
        context_length = self._description.context_length
        if is_probe(request):
            yield await self._probe()
        elif self._description.kind == "gateway":
            body = requests.gateway_body(request)
            yield gateway_chunk(await self._server.post(COMPLETION, body, headers))
        elif self._settings.role == "prefill":
            answer = await self._server.post(GENERATE, requests.prefill_body(request, context_length), headers)
            yield prefill_chunk(answer)
        else:
            body = requests.decode_body(request, context_length)
            prompt = requests.prefill_answer(request).get("prompt_logprobs")
            async with aclosing(self._server.stream(GENERATE, body, headers)) as events:
                async for event in events:
                    made = chunk(event)
                    if prompt and "finish_reason" in made:
                        made["engine_data"] = {"prompt_logprobs": prompt}
                    yield made

    async def _probe(self) -> Chunk:
        if self._description.kind == "gateway":
            if (problem := await self._server.problem()) is not None:
                raise HeadraceError(problem)
        else:
            await self._server.computes()
        return {"token_ids": [0], "index": 0, "finish_reason": "length"}


def run(settings: WorkerSettings) -> None:
    """Run a worker until a signal ends it. Raises ConfigError as HeadraceEngine.before() does."""
    run_backend(HeadraceEngine, engine_factory=lambda _: HeadraceEngine.before(settings))


def as_dynamo_has_it(error: ErrorInfo) -> Exception:
    """The exception by which Dynamo answers the client, or tries another worker (EngineShutdown: --migration-limit)."""
    where = f" ({error.field})" if error.field and error.field not in error.message else ""
    message = f"{error.message}{where}"
    found: Exception
    if error.status in (502, 503):
        found = EngineShutdown(message)
    elif error.status in (400, 404, 409, 413, 422):
        found = InvalidArgument(message)
    else:
        found = HttpError(error.status, message)
    return found


def _check_role(settings: WorkerSettings, description: Description) -> None:
    kind = "prefill" if description.kind == "gateway" else description.kind
    if kind != settings.role:
        raise ConfigError(
            f"{settings.url} is a {description.kind} server: start its worker with headrace dynamo {kind}"
        )


def _config(settings: WorkerSettings, description: Description, tokenizer: str) -> WorkerConfig:
    return WorkerConfig(
        namespace=settings.namespace,
        component=settings.component,
        endpoint="generate",
        model_name=tokenizer,
        served_model_name=description.model,
        endpoint_types="chat,completions",
        discovery_backend=settings.discovery_backend,
        request_plane=settings.request_plane,
        event_plane=settings.event_plane or None,
        custom_jinja_template=settings.chat_template or None,
        tool_call_parser=settings.tool_call_parser or None,
        reasoning_parser=settings.reasoning_parser or None,
        disaggregation_mode=MODES[settings.role],
    )


async def _until(stopped: "asyncio.Future[Any]", chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """The chunks that come before the request is stopped."""
    while True:
        following = asyncio.ensure_future(anext(chunks))
        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            following.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, HeadraceError):
                await following
            return
        try:
            yield following.result()
        except StopAsyncIteration:
            return


def _headers(context: Any) -> dict[str, str]:
    """Ids by which the logs of both servers and their spans name the request."""
    return {"x-request-id": context.id(), **(context.trace_headers() or {})}


def _end(reason: str) -> None:
    """End the process as a signal would: requests that are open end, and the worker leaves Dynamo."""
    log.error("%s; this worker ends", reason)
    os.kill(os.getpid(), signal.SIGTERM)
