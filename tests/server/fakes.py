"""A tiny tokenizer, a scripted scheduler, and servers over both without processes."""

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import httpx
import msgspec
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from headrace.core.config import Config, KvEventsConfig, ModelConfig, SchedulerConfig, ServerConfig
from headrace.core.messages.frontend import (
    Abort,
    AnyFrontendRequest,
    Drain,
    KvHint,
    QueryForecast,
    QueryStats,
    QueryStatus,
    Submit,
)
from headrace.core.messages.replies import (
    AnySchedulerReply,
    Drained,
    EngineState,
    ForecastReply,
    KvHinted,
    LogprobPart,
    RequestFailed,
    RequestFinished,
    Reserved,
    ServerInfo,
    StagePools,
    StatsReply,
    StatusReply,
    Tokens,
)
from headrace.core.runtime.clock import Clock
from headrace.core.stats import Stats
from headrace.core.status import SchedulerStatus
from headrace.core.types.errors import CANCELLED, ErrorInfo
from headrace.core.types.forecast import ForecastReport
from headrace.core.types.kv.geometry import CacheShape
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.core.types.requests.kv_hints import HintResult
from headrace.core.types.requests.prompt_logprobs import pack_runs
from headrace.core.types.requests.request import FetchFrom, HandoffStats, SendTo, Timing, TokenLogprob, Usage
from headrace.server.app import create_app
from headrace.server.frontend.service import Service
from headrace.server.http.connections import HttpConnections
from headrace.server.http.server import HttpServer
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

MERGES = ["he", "ll", "hell", "hello", "Ġw", "or", "ld", "Ġwor", "Ġworld", "ĊĊ", ".ĊĊ"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '\n' }}{% endfor %}"
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('nobody cannot speak') }}{% endif %}<|assistant|>"
)
LENGTH = 64
HIDDEN_SIZE = 4


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE over 256 bytes, a few words, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in MERGES:
        left = max((piece for piece in vocab if word.startswith(piece) and word[len(piece) :] in vocab), key=len)
        merges.append((left, word[len(left) :]))
        vocab[word] = len(vocab)
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return Tokenizer(rust, (rust.token_to_id("<eos>"),), ChatTemplate(TEMPLATE, {"eos_token": "<eos>"}))


Script = Callable[["FakeLink", Submit], Iterable[AnySchedulerReply]]
P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in an event loop of its own, with a deadline."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


class FakeLink:
    """A SchedulerLink to a scripted scheduler: it answers Submit with the messages that script returns, and Abort,
    Drain, QueryStats and QueryStatus as a scheduler does. info, state: sent at the start unless None."""

    def __init__(self, script: Script | None = None, *, answers_probes: bool = True) -> None:
        self.script: Script = script or (lambda _link, _submit: ())
        self.answers_probes = answers_probes
        self.info: ServerInfo | None = server_info(control_port=5555)
        self.state: EngineState | None = EngineState(ready=True)
        self.stats = Stats()
        self.status = SchedulerStatus()
        self.experts: tuple[ExpertLoad, ...] = ()
        self.sent: list[AnyFrontendRequest] = []
        self.closed = False
        self.failed = False
        self._open: set[str] = set()
        self._draining = False
        self._take: Callable[[AnySchedulerReply], None] | None = None
        self._early: list[AnySchedulerReply] = []
        self._new_message = asyncio.Event()

    def open(self, take: Callable[[AnySchedulerReply], None], lost: Callable[[], None]) -> None:
        self._take = take
        for message in filter(None, (self.info, self.state, *self._early)):
            self._deliver(message)

    def send(self, message: AnyFrontendRequest) -> None:
        self.sent.append(message)
        self._new_message.set()
        self._new_message = asyncio.Event()
        match message:
            case QueryStats() if self.answers_probes:
                self.say(StatsReply(token=message.token, stats=self.stats, experts=self.experts))
            case QueryStatus() if self.answers_probes:
                self.say(StatusReply(token=message.token, status=self.status))
            case QueryForecast():
                self.say(ForecastReply(token=message.token, report=ForecastReport(promise=0.0)))
            case KvHint():
                self.say(KvHinted(token=message.token, results=tuple(HintResult(tokens=1) for _ in message.actions)))
            case Submit():
                self._open.add(message.rid)
                for output in self.script(self, message):
                    self.say(output)
            case Abort() if message.rid in self._open:
                error = message.error or ErrorInfo(code=CANCELLED, message="cancelled", status=499)
                self.say(
                    finished(message.rid, "stop") if message.finish else RequestFailed(rid=message.rid, error=error)
                )
            case Drain():
                self._draining = True
                self._say_drained()

    def close(self) -> None:
        self.closed = True

    def say(self, message: AnySchedulerReply) -> None:
        """Send this to the front end."""
        self._deliver(message)
        if isinstance(message, RequestFinished | RequestFailed):
            self._open.discard(message.rid)
            self._say_drained()

    def _say_drained(self) -> None:
        if self._draining and not self._open:
            self._deliver(Drained())

    def _deliver(self, message: AnySchedulerReply) -> None:
        """In order, in a later turn of the event loop, as over a socket."""
        if self._take is None:
            self._early.append(message)
        else:
            asyncio.get_running_loop().call_soon(self._take, message)

    def of(self, kind: type[Any]) -> list[Any]:
        """Messages of this kind that the front end has sent so far."""
        return [message for message in self.sent if isinstance(message, kind)]

    async def wait_for(self, kind: type[Any], count: int = 1) -> Any:
        """The count-th message of this kind; waits for it."""
        async with asyncio.timeout(10):
            while len(self.of(kind)) < count:
                await self._new_message.wait()
        return self.of(kind)[count - 1]


def server_info(*, control_port: int) -> ServerInfo:
    """The identity of a server whose stages are ready."""
    cache = CacheShape("float32", 4, 2, 8)
    stages = StagePools(fingerprint="fp", kv_pages=100, data_endpoints=("tcp://127.0.0.1:5556",), cache=cache)
    return ServerInfo(instance="i" * 32, control_port=control_port, stages=stages)


def finished(
    rid: str, reason: str = "length", *, prompt: int = 3, completion: int = 1, cached: int = 0
) -> RequestFinished:
    return RequestFinished(
        rid=rid,
        reason=reason,
        usage=Usage(prompt, completion, cached),
        timing=Timing(bootstrap_s=0.0101, queue_s=0.0022, forward_s=0.0303, transfer_s=0.0044, decode_s=0.0505),
        handoff=HandoffStats(pages=2, bytes=4096, chunks=1),
    )


def saying(tokenizer: Tokenizer, text: str, reason: str = "length", *, cached: int = 0) -> Script:
    """A script that answers every prompt with this text, one token per message, with logprobs if requested."""
    ids = tokenizer.encode(text)

    def script(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        count = len(submit.prompt) // 4
        wanted = submit.sampling.logprobs
        sent = ids[: submit.sampling.max_tokens]
        for token in sent:
            labels = submit.sampling.label_token_ids
            logprobs = () if wanted is None else (made_up_logprob(token, wanted, labels),)
            yield Tokens(rid=submit.rid, tokens=(token,), logprobs=logprobs)
        yield finished(submit.rid, reason, prompt=count, completion=len(sent), cached=cached)

    return script


def logprob_parts(rid: str, entries: Sequence[TokenLogprob], start: int = 1) -> list[LogprobPart]:
    """Logprobs of prompt tokens from position start on, as the scheduler reports them."""
    return [LogprobPart(rid=rid, run=run) for run in pack_runs(start, entries)]


def made_up_logprob(token: int, alternatives: int, labels: tuple[int, ...] = ()) -> TokenLogprob:
    tops = labels or tuple((token + step) % 256 for step in range(alternatives))
    return TokenLogprob(token, -0.25, tops, tuple(-0.25 - step for step in range(len(tops))))


def failing(error: ErrorInfo) -> Script:
    return lambda _link, submit: [RequestFailed(rid=submit.rid, error=error)]


def reserving(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    """A decode scheduler's first answer to a request whose KV is fetched."""
    return [Reserved(rid=submit.rid)] if isinstance(submit.route, FetchFrom) else []


def ticket_of(submit: Submit) -> str | None:
    """The ticket of a request whose KV is sent or fetched."""
    return submit.route.ticket if isinstance(submit.route, SendTo | FetchFrom) else None


def make_config(
    tokenizer: Tokenizer,
    *,
    max_queued_requests: int = 4096,
    kv_events: KvEventsConfig | None = None,
    length: int = LENGTH,
    **server: Any,
) -> Config:
    return Config(
        model=ModelConfig(model="tiny", max_model_len=length, hidden_size=HIDDEN_SIZE),
        scheduler=SchedulerConfig(
            max_model_len=length, vocab_size=tokenizer.vocab_size, max_queued_requests=max_queued_requests
        ),
        server=ServerConfig(**server),
        kv_events=kv_events or KvEventsConfig(),
    )


@asynccontextmanager
async def running(
    link: FakeLink,
    tokenizer: Tokenizer,
    *,
    clock: Clock | None = None,
    prefill_transport: httpx.AsyncBaseTransport | None = None,
    **server: Any,
) -> AsyncIterator[Service]:
    """A started service; its engine is ready if the link's state is."""
    config = make_config(tokenizer, **server)
    service = Service(link, config, tokenizer=tokenizer, clock=clock, prefill_transport=prefill_transport)
    await service.start()
    try:
        if link.state is not None and link.state.ready:
            await service.readiness.wait_engine_ready()
        yield service
    finally:
        await service.stop()


@asynccontextmanager
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the service's application, in this process."""
    app = create_app(service)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


def json_of(response: httpx.Response) -> Any:
    return msgspec.json.decode(response.content)


@asynccontextmanager
async def listening(service: Service) -> AsyncIterator[str]:
    """The service's application behind a real HTTP server on a free loopback port; yields the URL."""
    async with listening_app(create_app(service)) as url:
        yield url


@asynccontextmanager
async def listening_app(app: FastAPI) -> AsyncIterator[str]:
    """An application behind a real HTTP server on a free loopback port; yields the URL."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = HttpServer(app, HttpConnections(1000), keep_alive_s=60)
        serving = asyncio.create_task(server.serve([bound]))
        await server.listens.wait()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.close()
            await serving
