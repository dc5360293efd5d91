"""State machine of one control connection at the decode side: hello, heartbeats, session, retries. Pure.

    ┌───────────── back-off ─────────────┐
    ▼                                    │ Refuse, silence, Goodbye, unfit Welcome
DOWN ──Hello──► GREETING ──Welcome──► UP ┘
"""

from collections.abc import Callable
from itertools import islice
from typing import Literal, NamedTuple

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import (
    PeerEvent,
    PrefillDown,
    PrefillUp,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.runtime.rate_limit import Backoff, printable
from headrace.core.stats import Counters
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.peers.addresses import host_port, url
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import PREFIX
from headrace.transfer.protocol import matching, messages, metadata
from headrace.transfer.protocol.messages import (
    Cancelled,
    ControlMessage,
    Failed,
    Finished,
    Goodbye,
    Hello,
    PeerMessage,
    Ping,
    Pong,
    Refuse,
    StageInfo,
    Welcome,
)

FIRST_RETRY_S = 0.05  # from then on twice as long each time
LAST_RETRY_S = 2.0
BAD_GATEWAY = 502
CHECK_KEYS = (
    "if its control endpoint can be reached, check that --curve-server-key is its public key and that its "
    "--curve-allowed folder "
    "has ours"
)
CHECK_CONTROL = (
    "check that its control endpoint can be reached from here and, if it has a --curve-key, set --curve-server-key here"
)


MayConnect = Callable[[str, int], bool]  # host, port


class Step(NamedTuple):
    """What to do after a message or a deadline."""

    sends: list[PeerMessage]
    """Messages to send on the connection."""
    events: list[PeerEvent]
    """For the scheduler."""
    reconnect: bool = False
    """Whether the messages go on a new connection."""


class ControlConnection:
    """The control connection to one prefill server.

    Args:
        name: of the prefill server, in events.
        host: of its control endpoint, and of stages for which its Welcome names no other.
        hello: returns the Hello to send; None while there is none.
        counters: of stale and refused messages.
        server_key: CURVE public key of the prefill server; "" for connections in the clear.
        may_connect: whether its stages may be at this host and port, where its Welcome names a host.

    Attributes:
        state: "down" without a connection, "greeting" until the answer to the Hello, then "up".
        welcome: of the open session; None without one.
        renewals: tickets that pings renew, each in turn if there are more than one ping can name.
    """

    def __init__(
        self,
        name: str,
        host: str,
        hello: Callable[[], Hello | None],
        config: TransferConfig,
        counters: Counters,
        *,
        server_key: str = "",
        may_connect: MayConnect = lambda host, port: True,
    ) -> None:
        self.name = name
        self.state: Literal["down", "greeting", "up"] = "down"
        self.welcome: Welcome | None = None
        self.renewals: dict[str, None] = {}  # the first is named next
        self._host = host
        self._server_key = server_key
        self._may_connect = may_connect
        self._hello = hello
        self._config = config
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        self._next_try = 0.0
        self._heard = 0.0
        self._next_ping = 0.0
        self._pings = 0
        self._reason: str | None = None  # last reported; a repeated one is not reported
        self._outdated = False  # our hello has changed since this session began
        self._counters = counters

    @property
    def session(self) -> str | None:
        """Secret of the open session; None without one."""
        return self.welcome.session if self.welcome and not self._outdated else None

    def outdate(self) -> None:
        """End the session because our Hello has changed. The next tick, which is due at once, connects again."""
        self._outdated = self.state != "down"

    def receive(self, message: ControlMessage, now: float) -> Step:
        """Handle a message of the control endpoint."""
        self._heard = now
        match message:
            case Welcome():
                return self._welcomed(message, now)
            case Refuse():
                return self._refused(message, now)
            case Goodbye():
                return self._down(f"goodbye: {printable(message.reason)}", now)
            case Pong():
                return Step([], [])
            case _ if self.welcome is None:
                self._counters.add("stale_messages_total", labels=("before_welcome",))
                return Step([], [])
            case _:
                return Step([], self._ticket_event(self.welcome.session, message))

    def tick(self, now: float) -> Step:
        """Connect again, ping, or give up after silence, whichever is due."""
        if self._outdated:
            return self._down("this server's stages have started again", now, wait_s=0.0)
        if self.state == "up" and self.welcome is not None:
            if self._heard + self.welcome.timeout_s <= now:
                return self._down(f"silent for {self.welcome.timeout_s:g} s", now, silent=True)
            if self._next_ping > now:
                return Step([], [])
            self._next_ping = now + self.welcome.heartbeat_s
            self._pings += 1
            return Step([Ping(number=self._pings, renew=self._next_renewals())], [])
        if self.state == "greeting" and self._heard + self._config.peer_timeout_s <= now:
            return self._down(f"no answer to the hello: {CHECK_KEYS if self._server_key else CHECK_CONTROL}", now)
        hello = self._hello()
        if self.state == "down" and self._next_try <= now and hello is not None:
            self.state, self._heard = "greeting", now
            return Step([hello], [], reconnect=True)
        return Step([], [])

    def next_deadline(self) -> float | None:
        """When tick() has to be called next; None while there is no Hello to send."""
        if self._outdated:
            return 0.0
        if self.state == "up" and self.welcome is not None:
            return min(self._next_ping, self._heard + self.welcome.timeout_s)
        if self.state == "greeting":
            return self._heard + self._config.peer_timeout_s
        return self._next_try if self._hello() is not None else None

    def unread(self, now: float) -> Step:
        """End the session: the control endpoint has left too many messages unread."""
        return self._down("it does not read what it is told", now)

    def closed(self, now: float) -> Step:
        """The connection was closed, and with it the session, whose end another connection would learn of."""
        return self._down("its connection was closed", now) if self.state == "up" else Step([], [])

    def close(self, now: float) -> Step:
        """End the session with a Goodbye."""
        return Step([Goodbye(reason="hung up")], self._forget_session("hung up here"))

    def _welcomed(self, welcome: Welcome, now: float) -> Step:
        hello = self._hello()
        if hello is None or self.state == "down" or (self.welcome and self.welcome.session == welcome.session):
            return Step([], [])  # late, or a repeated answer to a repeated hello
        unfit = matching.check_welcome(hello, welcome)
        if unfit is not None:
            return self._down(f"{unfit.code}: {printable(unfit.message)}", now, wait_s=LAST_RETRY_S, unfit=True)
        for stage in welcome.stages:
            if stage.data_host and not self._may_connect(stage.data_host, stage.data_port):
                where = host_port(stage.data_host, stage.data_port)
                reason = (
                    f"its stage {stage.rank} is at {where}, which may not be connected to: add it to --allow-prefill"
                )
                return self._down(reason, now, wait_s=LAST_RETRY_S, unfit=True)
        gone = self._forget_session("a new session replaces it")
        self.state, self.welcome, self._reason = "up", welcome, None
        self._backoff.reset()
        self._next_ping = now + welcome.heartbeat_s
        replicas = any(stage.replica for stage in welcome.stages)
        up = PrefillUp(
            name=self.name,
            terms=PrefillTerms(
                session=welcome.session,
                endpoints=tuple(self._endpoint(stage) for stage in welcome.stages),
                geometries=tuple(stage.geometry for stage in welcome.stages),
                stage_replicas=tuple(stage.replica for stage in welcome.stages) if replicas else (),
                window_bytes=welcome.window_bytes,
                server_key=self._server_key,
                backend=welcome.backend,
            ),
        )
        return Step([], [*gone, up])

    def _next_renewals(self) -> tuple[str, ...]:
        """Those that the next ping names."""
        named = tuple(islice(self.renewals, messages.MAX_RENEWALS))
        if len(named) < len(self.renewals):
            for ticket in named:
                del self.renewals[ticket]
            self.renewals.update(dict.fromkeys(named))
        return named

    def _endpoint(self, stage: StageInfo) -> str:
        return url("tcp", stage.data_host or self._host, stage.data_port)

    def _refused(self, refuse: Refuse, now: float) -> Step:
        if self.state == "up" and refuse.code != messages.NO_SESSION:
            self._counters.add("refused_here_total", labels=(refuse.code,))  # one bad frame; the session stands
            return Step([], [])
        if self.state == "up":
            return self._down("the server has restarted, or dropped this session", now, wait_s=0.0)
        if self.state == "down":
            return Step([], [])
        lasting = refuse.code.endswith("_mismatch")
        wait_s = LAST_RETRY_S if lasting else None
        reason = printable(f"{refuse.code}: {refuse.message}")
        return self._down(reason, now, wait_s=wait_s, unfit=lasting)

    def _down(
        self, reason: str, now: float, wait_s: float | None = None, *, unfit: bool = False, silent: bool = False
    ) -> Step:
        """End the session or the attempt; the next attempt is made on a fresh connection."""
        events = self._forget_session(reason, silent=silent)
        if not events and reason != self._reason:
            events = [PrefillDown(name=self.name, session=None, reason=reason, unfit=unfit)]
        self._reason = reason
        self._outdated = False
        self.state = "down"
        delay_s = self._backoff.next_delay()
        self._next_try = now + (delay_s if wait_s is None else wait_s)
        return Step([], events)

    def _forget_session(self, reason: str, *, silent: bool = False) -> list[PeerEvent]:
        if self.welcome is None:
            return []
        session, self.welcome = self.welcome.session, None
        self.renewals.clear()
        return [PrefillDown(name=self.name, session=session, reason=reason, silent=silent)]

    def _ticket_event(self, session: str, message: Failed | Finished | Cancelled) -> list[PeerEvent]:
        ticket, generation = message.ticket, message.generation
        if isinstance(message, Cancelled):
            return [TicketCancelled(session=session, ticket=ticket, generation=generation)]
        if isinstance(message, Failed):
            error = ErrorInfo(
                code=message.code,
                message=message.message,
                status=message.status if message.status >= 400 else BAD_GATEWAY,  # a failure is answered as one
                retry_after_s=message.retry_after_s,
                stage=message.stage,
            )
            return [TicketFailed(session=session, ticket=ticket, generation=generation, error=error)]
        if not message.metadata:
            return []  # every chunk was acknowledged: the stages have said so
        return [self._finished(session, message)]

    def _finished(self, session: str, message: Finished) -> PeerEvent:
        ticket, generation = message.ticket, message.generation
        try:
            first = metadata.first_token(message.metadata, ticket, generation)
            if first.finish_reason in ("", PREFIX):
                raise ValueError("the request goes on after its first token, and its KV has not come")
        except ValueError as error:
            info = ErrorInfo(code=messages.BAD_METADATA, message=str(error), status=BAD_GATEWAY)
            return TicketFailed(session=session, ticket=ticket, generation=generation, error=info)
        return TicketFinished(session=session, ticket=ticket, generation=generation, first=first)
