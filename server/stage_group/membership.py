"""A stage's membership in a group that it has to join first: the stage's side of core/messages/membership.py. Pure.

    JOINING ──Admitted──► MEMBER ──Dismissed, or a silent scheduler──► ended
       └── Refused, or nobody admits it in time ─────────────────────► ended

The JoinRequest is repeated in both states: what is said again and again cannot be lost, and either side knows by it
that the other is there.
"""

import msgspec

from headrace.core.config import StageConfig
from headrace.core.messages.membership import Admitted, AnswerMessage, Dismissed, JoinRequest, Refused, Waiting

JOIN_EVERY_S = 0.5  # while joining; a member is as frequent as its server's other heartbeats
REMIND_EVERY_S = 30.0
PATIENCE = 3  # of a member with a silent scheduler, in peer timeouts: its restart costs a load of the model
MISTAKE, FAILURE = 2, 1  # exit statuses: starting it again will not help, or will


class End(msgspec.Struct, frozen=True):
    """Why the process has to end, and with which exit status."""

    status: int
    message: str


class Membership:
    """What to say to the scheduler and when, and what came of it.

    config is set while a member, end when it is over. timeout_s: how long it may take until it is admitted.
    """

    def __init__(self, join: JoinRequest, timeout_s: float, now: float) -> None:
        self.config: StageConfig | None = None
        self.end: End | None = None
        self._join = join
        self._timeout_s = timeout_s
        self._started = now
        self._heard = now
        self._next_join = now
        self._next_reminder = now + REMIND_EVERY_S
        self._status = "no answer from the scheduler yet"
        self._news = ""

    def receive(self, answer: AnswerMessage, now: float) -> None:
        """Handle what the scheduler said."""
        self._heard = now
        match answer:
            case Waiting() if self.config is None:
                if answer.message != self._status:
                    self._status = self._news = answer.message
            case Admitted() if self.config is None:
                self.config = answer.config
                self._join = msgspec.structs.replace(self._join, session=answer.config.session)
                self._next_join = now
            case Refused():
                self.end = End(MISTAKE, f"the scheduler refused this stage: {answer.message}")
            case Dismissed():
                self.end = End(FAILURE, f"the group of stages has ended: {answer.message}")
            case _:
                pass  # another word on what is settled

    def tick(self, now: float) -> JoinRequest | None:
        """What is due to be said. Read before: a side must not call the other silent while words of it wait."""
        if self._deadline() <= now and self.end is None:
            self.end = End(FAILURE, self._lateness())
        if self.end is not None or now < self._next_join:
            return None
        if self.config is None and now >= self._next_reminder:
            self._next_reminder = now + REMIND_EVERY_S
            self._news = f"still joining after {now - self._started:.0f} s: {self._status}"
        self._next_join = now + self._interval()
        return self._join

    def next_deadline(self) -> float:
        return min(self._next_join, self._deadline())

    def news(self) -> str:
        """A line for whoever watches, or "" when there is nothing new."""
        news, self._news = self._news, ""
        return news

    def _interval(self) -> float:
        return JOIN_EVERY_S if self.config is None else self.config.transfer.peer_timeout_s / 3

    def _deadline(self) -> float:
        if self.config is None:
            return self._started + self._timeout_s
        return self._heard + PATIENCE * self.config.transfer.peer_timeout_s

    def _lateness(self) -> str:
        if self.config is None:
            return f"not admitted within {self._timeout_s:g} s: {self._status}"
        return f"the scheduler has been silent for {PATIENCE * self.config.transfer.peer_timeout_s:g} s"
