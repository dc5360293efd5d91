"""Membership of an external stage in its group: the stage's side of core/messages/membership.py. Pure.

    JOINING ──JoinAccepted──► MEMBER ──GroupEnded, or scheduler silent──► ended
       └── JoinRefused, or not admitted within the timeout ─────────────► ended

The JoinRequest is repeated in both states, so a lost one does no harm, and it serves as a heartbeat.
"""

import msgspec

from headrace.core.config import StageConfig
from headrace.core.messages.membership import (
    AnyJoinReply,
    GroupEnded,
    JoinAccepted,
    JoinPending,
    JoinRefused,
    JoinRequest,
)
from headrace.core.runtime.process import CONFIGURATION_MISTAKE

JOIN_INTERVAL_S = 0.5  # while joining; a member sends at the interval of its server's other heartbeats
LOG_INTERVAL_S = 30.0
SILENT_TIMEOUTS = 3  # peer timeouts until a member gives up a silent scheduler: its restart loads the model again
EXIT_FAILURE = 1  # exit status: a restart may help


class MembershipEnd(msgspec.Struct, frozen=True):
    """Why the stage process has to exit."""

    status: int
    """Exit status."""
    message: str


class Membership:
    """Decides what the stage sends to the scheduler and when, and what follows from the replies.

    Args:
        request: the JoinRequest of this process.
        timeout_s: longest time until it is admitted, in seconds.
    """

    def __init__(self, request: JoinRequest, timeout_s: float, now: float) -> None:
        self.config: StageConfig | None = None
        """Set while the stage is a member."""
        self.end: MembershipEnd | None = None
        """Set once the membership is over."""
        self._request = request
        self._timeout_s = timeout_s
        self._started_at = now
        self._last_heard = now
        self._next_join = now
        self._next_log = now + LOG_INTERVAL_S
        self._status = "no answer from the scheduler yet"
        self._log_line = ""

    def receive(self, reply: AnyJoinReply, now: float) -> None:
        """Handle a reply of the scheduler."""
        self._last_heard = now
        match reply:
            case JoinPending() if self.config is None:
                if reply.message != self._status:
                    self._status = self._log_line = reply.message
            case JoinAccepted() if self.config is None:
                self.config = reply.config
                self._request = msgspec.structs.replace(self._request, session=reply.config.session)
                self._next_join = now
            case JoinRefused():
                self.end = MembershipEnd(CONFIGURATION_MISTAKE, f"the scheduler refused this stage: {reply.message}")
            case GroupEnded():
                self.end = MembershipEnd(EXIT_FAILURE, f"the group of stages has ended: {reply.message}")
            case _:
                pass  # late or repeated

    def tick(self, now: float) -> JoinRequest | None:
        """Returns the JoinRequest if it is due. Call receive() first: an unread reply is no silence."""
        if self._deadline() <= now and self.end is None:
            self.end = MembershipEnd(EXIT_FAILURE, self._timeout_message())
        if self.end is not None or now < self._next_join:
            return None
        if self.config is None and now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            self._log_line = f"still joining after {now - self._started_at:.0f} s: {self._status}"
        self._next_join = now + self._join_interval()
        return self._request

    def next_deadline(self) -> float:
        """When tick() is to be called."""
        return min(self._next_join, self._deadline())

    def pop_log_line(self) -> str:
        """A line to log about the join, once; empty when nothing has changed."""
        line, self._log_line = self._log_line, ""
        return line

    def _join_interval(self) -> float:
        return JOIN_INTERVAL_S if self.config is None else self.config.transfer.peer_timeout_s / 3

    def _deadline(self) -> float:
        if self.config is None:
            return self._started_at + self._timeout_s
        return self._last_heard + SILENT_TIMEOUTS * self.config.transfer.peer_timeout_s

    def _timeout_message(self) -> str:
        if self.config is None:
            return f"not admitted within {self._timeout_s:g} s: {self._status}"
        return f"the scheduler has been silent for {SILENT_TIMEOUTS * self.config.transfer.peer_timeout_s:g} s"
