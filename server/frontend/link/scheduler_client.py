"""The front end's client of the scheduler: requests, state, and a liveness probe.

call.next() ◄── queue per rid ◄─┐
engine, server_info, stats    ◄─┼─ link ◄── scheduler
on_news(News)                 ◄─┘
post() ──────────────────────────► link ──► scheduler
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from headrace.core.messages.frontend import (
    Abort,
    AnyFrontendRequest,
    KvHint,
    QueryForecast,
    QueryPrefix,
    QueryStats,
    Submit,
    WriteRecording,
)
from headrace.core.messages.replies import (
    AnySchedulerReply,
    Drained,
    EngineState,
    ForecastReply,
    KvDigested,
    KvHinted,
    PrefillState,
    PrefixReply,
    RecordingWritten,
    RequestFailed,
    RequestFinished,
    RequestTraced,
    ServerInfo,
    StageDown,
    StageTraced,
    StatsReply,
    StatusReply,
    Traced,
)
from headrace.core.runtime.background import keep_running
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.liveness import Activity, Cause, Finding, Limits, Silence
from headrace.core.stats import Stats
from headrace.core.types import refusals
from headrace.core.types.errors import CANCELLED, TICKET_IN_USE, ErrorInfo, HeadraceError
from headrace.core.types.forecast import ForecastReport
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.core.types.requests.kv_hints import HintAction, HintResult
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.link.call import Call
from headrace.server.frontend.link.scheduler_link import SchedulerLink

log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=AnySchedulerReply)

PROBE_S = 1.0
ANSWER_S = 5.0  # in which the scheduler has to answer a hint, or what it forecasts
RECORDING_S = 60.0  # in which it has to have written a recording
LATE_S = 0.25  # by which this loop may be late before it counts as having slept
SUSPECT_S = 1.5  # without an answer to a probe, after which the scheduler's process is looked at
SILENT_S = 5.0  # in which the scheduler could have answered a probe, after which the server is unhealthy
LOST_S = 20.0  # the same, after which open requests fail

News = EngineState | StageDown | PrefillState | KvDigested | Traced | StageTraced | RequestTraced | StatusReply
"""What the scheduler says that is about no call, and concerns other parts of the front end."""


class SchedulerClient:
    """Sends messages to the scheduler in order and routes its replies to calls and on_news. Used in one event loop.

    inspect: what the scheduler's process does, if that can be known. hang_s: longest silence of a scheduler that is
    stopped, busy, or without a core.
    """

    def __init__(
        self,
        link: SchedulerLink,
        clock: Clock,
        *,
        on_news: Callable[[News], None] = lambda _news: None,
        inspect: Callable[[], Activity | None] = lambda: None,
        hang_s: float = LOST_S,
    ) -> None:
        self._link = link
        self._clock = clock
        self._on_news = on_news
        self._calls: dict[str, Call] = {}
        self._pieces = 0  # of open prompts, among the calls
        self._ending: set[str] = set()  # rids of aborted requests whose end the scheduler has not reported yet
        self._held: dict[str, str] = {}  # tenants of held requests, by rid
        self._queries: dict[int, asyncio.Future[Stats]] = {}
        self._asked: dict[int, asyncio.Future[AnySchedulerReply]] = {}  # by the tokens of messages
        self._token = 0
        self._inspect = inspect
        self._silence = Silence(Limits(LOST_S, max(LOST_S, hang_s)), clock.now())
        self._cause: Cause | None = None  # of the silence that was logged
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_s = 0.0  # when the probe is due, in the loop's time
        self._probing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._drained = False
        self._ended: ErrorInfo | None = None  # what all calls fail with, after end_all()
        self.engine: EngineState | None = None  # as last reported; None before the first report
        self.server_info: ServerInfo | None = None
        self.stats = Stats()
        self.experts: tuple[ExpertLoad, ...] = ()  # as of the last snapshot

    def start(self) -> None:
        """Begin to receive and to probe."""
        self._loop = asyncio.get_running_loop()
        self._wake_s = self._loop.time()
        self._silence.heard(self._clock.now())
        self._link.open(self._take, self._link_lost)
        self._probing = asyncio.create_task(keep_running("the watch over the scheduler", self._probe))

    async def stop(self) -> None:
        """Close the link; open requests fail with 503."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        self.fail_all(refusals.STOPPED.error())
        self._link.close()

    def open(self, submit: Submit) -> Call:
        """A call, to be entered as a context. Entering raises HeadraceError: 409 while the rid is in use, 503 if the
        scheduler is silent."""
        return Call(self, submit)

    def register(self, call: Call) -> None:
        """Route replies to this call. Raises HeadraceError (409, 503) as open() says."""
        if call.rid in self._calls or call.rid in self._ending or call.rid in self._held:
            message = f"rid {call.rid!r} is in use by another request"
            raise HeadraceError(ErrorInfo(code=TICKET_IN_USE, message=message, status=409, field="rid"))
        if problem := self.problem():
            raise refusals.SCHEDULER_SILENT.raised(problem=problem)
        if self._ended is not None:
            raise HeadraceError(self._ended)
        self._calls[call.rid] = call
        self._pieces += call.piece

    def unregister(self, call: Call) -> None:
        """Stop routing replies to this call."""
        del self._calls[call.rid]
        self._pieces -= call.piece
        if not call.ended:
            if call.kept:
                self._held[call.rid] = call.tenant
            else:
                self._ending.add(call.rid)
        self._notify()

    def post(self, message: AnyFrontendRequest) -> None:
        """Send a message."""
        self._link.send(message)

    def cancel(self, rid: str, tenant: str) -> bool:
        """Abort an open or held request; False if there is none with this id, or it is another tenant's. tenant: ""
        for any."""
        call = self._calls.get(rid)
        owner = call.tenant if call is not None else self._held.get(rid)
        known = owner is not None and tenant in ("", owner)
        if known:
            error = ErrorInfo(code=CANCELLED, message=f"request {rid} was cancelled", status=499)
            self.post(Abort(rid=rid, error=error))
        return known

    @property
    def open_calls(self) -> int:
        """Number of calls whose context was not left, without pieces of open prompts."""
        return len(self._calls) - self._pieces

    @property
    def held_calls(self) -> int:
        """Number of requests that the scheduler holds beyond their calls."""
        return len(self._held)

    def end_all(self, error: ErrorInfo) -> None:
        """Fail every open call with this error, and all that would be opened."""
        self._ended = error
        self.fail_all(error)

    def fail_all(self, error: ErrorInfo) -> None:
        """Fail every open call without waiting for the scheduler, which gets their Aborts when it runs again."""
        for call in self._calls.values():
            call.lose(error)

    def problem(self) -> str | None:
        """Why the scheduler counts as dead, or None while it answers, or cannot answer and is not dead."""
        if self._link.failed:
            return "the connection to the scheduler has failed"
        found = self._look(SILENT_S)
        if found is None or (found.charged_s <= SILENT_S and not found.hung):
            return None
        return f"the scheduler {found.text}"

    def excuse(self) -> str | None:
        """Why the scheduler does not answer though it is not dead: it is stopped, busy, or without a core."""
        found = self._look(SUSPECT_S)
        if found is None or not (found.cause is Cause.STOPPED or found.silent_s > SILENT_S):
            return None
        return f"the scheduler {found.text}"

    def _look(self, after_s: float) -> Finding | None:
        """Judge a silence of more than after_s; None while there is none, or while this loop itself was late: what has
        come meanwhile is read first."""
        now = self._clock.now()
        if now - self._silence.heard_at <= after_s:
            return None
        if self._loop is not None and self._loop.time() > self._wake_s + LATE_S:
            return None
        return self._silence.look(now, self._inspect())

    async def query_stats(self, timeout_s: float) -> Stats:
        """A new snapshot of the metrics, or the last one if the scheduler does not answer in time."""
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        token = self._query(answer)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return self.stats
        finally:
            self._queries.pop(token, None)

    async def query_prefix(
        self, prompt: bytes, terms: RequestTerms, timeout_s: float, host: str = ""
    ) -> PrefixReply | None:
        """What the prefix cache has of a packed prompt, and whether a peer at this host has a session; None if the
        scheduler does not answer in time. terms: with its tenant and salt."""
        salt, tenant = terms.prefix_salt, terms.tenant
        try:
            return await self._answer(
                PrefixReply,
                lambda token: QueryPrefix(token=token, prompt=prompt, salt=salt, tenant=tenant, host=host),
                timeout_s,
            )
        except TimeoutError:
            return None

    async def query_forecast(self) -> ForecastReport:
        """What the scheduler promises and forecasts. Raises HeadraceError (503) if it does not answer."""
        return (await self._ask(ForecastReply, lambda token: QueryForecast(token=token), ANSWER_S)).report

    async def hint(self, prompt: bytes, terms: RequestTerms, actions: tuple[HintAction, ...]) -> tuple[HintResult, ...]:
        """What the scheduler grants of hints for a prompt's KV. Raises HeadraceError (503) if it does not answer."""

        def hint(token: int) -> KvHint:
            return KvHint(token=token, prompt=prompt, terms=terms, actions=actions)

        return (await self._ask(KvHinted, hint, ANSWER_S)).results

    async def write_recording(self, alerts: str = "") -> RecordingWritten:
        """Have what the flight recorder has written into a file. alerts: those that fire, in words, where it is for
        them. Raises HeadraceError (503) if there is no answer."""

        def write(token: int) -> WriteRecording:
            return WriteRecording(token=token, reason="alert" if alerts else "request", alerts=alerts)

        return await self._ask(RecordingWritten, write, RECORDING_S)

    async def _ask(self, kind: type[Reply], query: Callable[[int], AnyFrontendRequest], timeout_s: float) -> Reply:
        """As _answer(), for a client who waits. Raises HeadraceError (503) if there is no answer."""
        if problem := self.problem():
            raise refusals.SCHEDULER_SILENT.raised(problem=problem)
        try:
            return await self._answer(kind, query, timeout_s)
        except TimeoutError:
            problem = f"the scheduler has not answered in {timeout_s:g} s"
            raise refusals.SCHEDULER_SILENT.raised(problem=problem) from None

    async def _answer(self, kind: type[Reply], query: Callable[[int], AnyFrontendRequest], timeout_s: float) -> Reply:
        """The scheduler's reply of a kind to a message with a new token. Raises TimeoutError."""
        answer: asyncio.Future[AnySchedulerReply] = asyncio.get_running_loop().create_future()
        self._token += 1
        token = self._token
        self._asked[token] = answer
        self.post(query(token))
        try:
            reply = await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._asked[token]
        assert isinstance(reply, kind), "tokens name one message"
        return reply

    async def wait_drained(self) -> None:
        """Wait until the scheduler has sent Drained and every call was left."""
        await self.wait_for(lambda: self._drained and not self._calls)

    async def wait_idle(self) -> None:
        """Wait until every call was left."""
        await self.wait_for(lambda: not self._calls)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever the state of this client changes."""
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _query(self, answer: "asyncio.Future[Stats] | None" = None) -> int:
        self._token += 1
        if answer is not None:
            self._queries[self._token] = answer
        self.post(QueryStats(token=self._token))
        return self._token

    async def _probe(self) -> None:
        """Ask for statistics on a timer, since silence triggers no event."""
        loop = asyncio.get_running_loop()
        while True:
            self._query()
            self._silence.asked(self._clock.now())
            self._wake_s = loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            late_s = max(0.0, loop.time() - self._wake_s)  # replies could not be read while this loop was blocked
            self._wake_s = loop.time()
            self._silence.excuse(late_s, self._clock.now())
            self._judge()

    def _judge(self) -> None:
        """Log what a silent scheduler does, and fail the open requests if it hangs."""
        found = self._look(SUSPECT_S)
        if found is None:
            return
        if found.cause is not self._cause and found.cause is not Cause.UNKNOWN:
            self._cause = found.cause
            log.warning("the scheduler %s", found.text)
        if found.hung and self._calls:
            log.error("the scheduler %s", found.text)
            self.fail_all(refusals.SCHEDULER_HANGS.error(finding=found.text))

    def _link_lost(self) -> None:
        """The scheduler has ended, and this server with it: open requests fail while they can still be answered."""
        self.fail_all(refusals.SCHEDULER_LOST.error())

    def _take(self, message: AnySchedulerReply) -> None:
        match message:
            case StatsReply():
                self._silence.heard(self._clock.now())
                self._cause = None
                self.stats = message.stats
                self.experts = message.experts
                if (answer := self._queries.pop(message.token, None)) is not None and not answer.done():
                    answer.set_result(message.stats)
            case PrefixReply() | ForecastReply() | KvHinted() | RecordingWritten():
                if (asked := self._asked.get(message.token)) is not None and not asked.done():
                    asked.set_result(message)
            case EngineState() | PrefillState():
                if isinstance(message, EngineState):
                    self.engine = message
                self._on_news(message)
                self._notify()
            case ServerInfo():
                self.server_info = message
            case StageDown() | KvDigested() | Traced() | StageTraced() | RequestTraced() | StatusReply():
                self._on_news(message)
            case Drained():
                self._drained = True
                self._notify()
            case _:
                if (call := self._calls.get(message.rid)) is not None:
                    call.deliver(message)
                elif isinstance(message, RequestFinished | RequestFailed):
                    self._ending.discard(message.rid)
                    self._held.pop(message.rid, None)
