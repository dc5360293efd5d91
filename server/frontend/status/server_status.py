"""What GET /status says: the scheduler's status, and what the front end knows of peers, requests and errors."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec

from headrace.core.config import Config
from headrace.core.messages.frontend import AnyFrontendRequest, QueryStatus
from headrace.core.messages.replies import PrefillState, StageDown, StatusReply
from headrace.core.runtime.clock import Clock, wall_time
from headrace.core.status import PeerLink, PeerNote, SchedulerStatus
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.peers.addresses import host_port, usable_host
from headrace.core.version import headrace_version
from headrace.server.config.settings import SETTINGS
from headrace.server.frontend.status.readiness import Readiness
from headrace.server.frontend.status.recent_events import (
    EndedRequest,
    FirstTokens,
    Level,
    RecentEvent,
    RecentEvents,
    first_tokens,
)
from headrace.server.upstream.prefill_pool import PrefillPool

TIMEOUT_S = 1.0  # for the scheduler's answer
FRESH_S = 0.2  # in which an answer is good for the next viewer, too
LISTED_REQUESTS = 40
# Fields of the request log that end with the first token. On a prefill server KV is sent after it, too.
PARTS = {
    "prefill": ("bootstrap_s", "queue_s", "forward_s"),
    "decode": ("bootstrap_s", "queue_s", "forward_s", "transfer_s"),
    "colocated": ("queue_s", "forward_s"),
}


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A server at the other end of a handoff."""

    name: str
    """The URL of a prefill server; what a decode server calls itself."""
    role: str
    up: bool
    backend: str
    """How KV moves: cuda_ipc, shm, zmq, nixl, fake; "" while it is down."""
    note: str
    """Why that backend, or why the server is down."""
    requests: int
    since_s: float | None
    """Since it is up or down; None where it never was up."""


class ShownSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in effect. Secrets have no value."""

    group: str
    key: str
    value: object
    changed: bool
    """It has another value than by default: configured, or resolved at the start."""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the response."""

    version: str
    role: str
    model: str
    dtype: str
    device: str
    address: str
    """HOST:PORT of HTTP."""
    instance: str
    """Random id of this run of the server; "" until the scheduler has said it."""
    now: float
    """Seconds since the epoch."""
    uptime_s: float
    ready: bool
    reason: str
    """Why a request would be refused now; "" if it would not."""
    page_size: int
    stages: list[str]
    """Names of all ranks."""
    restarts: int
    """Times the stages were started again and came up."""
    scheduler: SchedulerStatus | None
    """None while it has not answered."""
    scheduler_age_s: float
    """Seconds since that answer: more than a moment while the scheduler is slow."""
    peers: list[Peer]
    first_token: FirstTokens
    recent: list[EndedRequest]
    events: list[RecentEvent]
    memory: Sequence[str]
    """How the memory of each rank is divided, in words."""
    config: msgspec.Raw
    """A list of Setting."""


class KnownStatus(msgspec.Struct, frozen=True):
    """The scheduler's last answer."""

    status: SchedulerStatus
    age_s: float
    """Seconds since it came."""


class StatusQuery:
    """Asks the scheduler for its status: one question at a time, however many viewers there are. post: sends to the
    scheduler, whose answers have to be passed to take()."""

    def __init__(self, post: Callable[[AnyFrontendRequest], None], clock: Clock, timeout_s: float = TIMEOUT_S) -> None:
        self._post = post
        self._clock = clock
        self._timeout_s = timeout_s
        self._token = 0
        self._answer: asyncio.Future[None] | None = None
        self._status = SchedulerStatus()
        self._taken: float | None = None

    async def ask(self) -> KnownStatus | None:
        """The status as of now; an earlier one if the scheduler does not answer in time, None if it never has."""
        if self._taken is None or self._clock.now() - self._taken > FRESH_S:
            if self._answer is None:
                self._token += 1
                self._answer = asyncio.get_running_loop().create_future()
                self._post(QueryStatus(token=self._token, requests=LISTED_REQUESTS))
            await asyncio.wait((self._answer,), timeout=self._timeout_s)
        return self.last()

    def last(self) -> KnownStatus | None:
        """The last answer, without a question."""
        if self._taken is None:
            return None
        return KnownStatus(self._status, self._clock.now() - self._taken)

    def take(self, reply: StatusReply) -> None:
        """The scheduler's answer, which may come long after the question."""
        self._status, self._taken = reply.status, self._clock.now()
        if self._answer is not None and reply.token == self._token:
            self._answer.set_result(None)
            self._answer = None


class StatusCollector:
    """Joins what this process knows with the scheduler's answer. Nothing is collected but when it is asked for.

    memory: see ServerStatus. instance: this run of the server.
    """

    def __init__(
        self,
        config: Config,
        readiness: Readiness,
        query: StatusQuery,
        events: RecentEvents,
        prefills: PrefillPool | None,
        clock: Clock,
        *,
        memory: Sequence[str],
        instance: Callable[[], str],
    ) -> None:
        self._config = config
        self._readiness = readiness
        self._query = query
        self._events = events
        self._prefills = prefills
        self._clock = clock
        self._memory = memory
        self._instance = instance
        self._settings = msgspec.Raw(msgspec.json.encode(list(_settings(config))))
        self._started = clock.now()
        self._restarts = 0
        self._down = False  # the stages have failed, and are not up again
        self._up_before = False

    def stages_ready(self) -> None:
        """All stages are up, or answer again."""
        text = "all stages answer again"
        if not self._up_before:
            text = "all stages are up for the first time"
        elif self._down:
            self._restarts += 1
            text = "all stages are up again"
        self._up_before, self._down = True, False
        self._events.note("stages", "up", text, self._clock.now(), level="info")

    def stage_down(self, down: StageDown) -> None:
        """A stage has failed. Its group may be reported twice: that it has exited, and that it is silent."""
        self._down = True
        name = self._config.scheduler.layout.name(down.stage)
        self._events.note("stages", down.message, f"{name} failed: {down.message}", self._clock.now(), level="error")

    def prefill(self, state: PrefillState) -> None:
        """A prefill server was reached or lost."""
        text = f"{state.name} is up" if state.up else f"{state.name} is down: {state.reason}"
        level: Level = "error" if not state.up and self._was_up(state.name) else "info"
        self._events.note("prefill", f"{state.name} {state.up}", text, self._clock.now(), level=level)

    def _was_up(self, prefill: str) -> bool:
        """Whether a prefill server has been reached before: another one may still be starting."""
        known = self._prefills.known() if self._prefills is not None else ()
        return any(server.url == prefill and server.changed_at is not None for server in known)

    async def status(self) -> ServerStatus:
        """The status as of now."""
        known = await self._query.ask() if self._readiness.unhealthy() is None else self._query.last()
        now, config = self._clock.now(), self._config
        problem = self._readiness.not_ready()
        scheduler = known.status if known is not None else None
        recent = self._events.requests(now)
        return ServerStatus(
            version=headrace_version(),
            role=config.server.role,
            model=config.model_name,
            dtype=config.model.dtype,
            device=config.model.device,
            address=host_port(usable_host(config.server.host), config.server.port),
            instance=self._instance(),
            now=wall_time(),
            uptime_s=now - self._started,
            ready=problem is None,
            reason=problem.message if isinstance(problem, ErrorInfo) else "",
            page_size=config.engine.page_size,
            stages=[config.scheduler.layout.name(rank) for rank in config.scheduler.layout.ranks],
            restarts=self._restarts,
            scheduler=scheduler,
            scheduler_age_s=known.age_s if known is not None else 0.0,
            peers=list(_peers(scheduler, self._prefills, now)),
            first_token=first_tokens(recent, PARTS[config.server.role]),
            recent=recent,
            events=_merged(self._events.events(now), scheduler),
            memory=self._memory,
            config=self._settings,
        )


def _settings(config: Config) -> Iterator[ShownSetting]:
    for setting in SETTINGS:
        value = setting.value(config)
        changed = value != setting.default
        if setting.flag.secret:
            value = "set, not shown" if value else ""
        yield ShownSetting(group=setting.flag.group, key=setting.key, value=value, changed=changed)


def _peers(scheduler: SchedulerStatus | None, prefills: PrefillPool | None, now: float) -> Iterator[Peer]:
    """Prefill servers as the pool knows them, with the scheduler's sessions; then decode servers that are or were
    connected."""
    links = {link.name: link for link in scheduler.peers} if scheduler is not None else {}
    for server in prefills.known() if prefills is not None else ():
        link = links.get(server.url)
        since_s = now - server.changed_at if server.changed_at is not None else None
        yield Peer(
            name=server.url,
            role="prefill",
            up=server.up,
            backend=link.backend if link is not None else "",
            note="" if server.up else server.reason,
            requests=link.requests if link is not None else 0,
            since_s=since_s,
        )
    if scheduler is None:
        return
    for link in scheduler.peers:
        if link.role == "decode":
            yield _decode_peer(link)
    yield from _gone(scheduler)


def _decode_peer(link: PeerLink) -> Peer:
    return Peer(
        name=link.name,
        role="decode",
        up=link.up,
        backend=link.backend,
        note=link.backend_reason,
        requests=link.requests,
        since_s=link.joined_s,
    )


def _gone(scheduler: SchedulerStatus) -> Iterator[Peer]:
    """Decode servers whose last session has ended."""
    seen = {link.name for link in scheduler.peers}
    for note in scheduler.notes:
        if note.peer not in seen:
            seen.add(note.peer)
            yield Peer(
                name=note.peer, role="decode", up=False, backend="", note=note.text, requests=0, since_s=note.ago_s
            )


def _merged(events: list[RecentEvent], scheduler: SchedulerStatus | None) -> list[RecentEvent]:
    """With the sessions of decode servers, newest first."""
    notes = scheduler.notes if scheduler is not None else ()
    return sorted([*events, *map(_session_event, notes)], key=lambda event: event.ago_s)


def _session_event(note: PeerNote) -> RecentEvent:
    text = f"{note.peer} is connected; {note.text}" if note.up else f"{note.peer} is gone: {note.text}"
    return RecentEvent(note.ago_s, note.ago_s, 1, "info" if note.up else "error", "peer", text)
