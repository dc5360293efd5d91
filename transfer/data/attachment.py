"""The timing of one data connection: attach, try again when refused, ping while attached. Pure."""

from headrace.core.runtime.rate_limit import Backoff
from headrace.transfer.protocol.messages import Attach, Attached, Ping, Pong, Refuse

FIRST_RETRY_S = 0.02
LAST_RETRY_S = 1.0


class Attachment:
    """When to send Attach and Ping on a data connection.

    Args:
        attach: the first message. It is repeated until the stage answers, since the stage may not have heard of the
            session yet, and on every new connection.
        timeout_s: of silence, after which a new connection is wanted. Pings go out three times as often.

    Attributes:
        attached: whether the stage has answered on this connection.
        stale: whether the stage was silent for so long that the next message wants a new connection.
    """

    def __init__(self, attach: Attach, timeout_s: float, now: float) -> None:
        self.attached = False
        self.stale = False
        self._attach = attach
        self._heartbeat_s = timeout_s / 3
        self._timeout_s = timeout_s
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        self._next = now
        self._heard = now
        self._pings = 0

    def tick(self, now: float) -> Attach | Ping | None:
        """The message that is due, if any."""
        if self._next > now:
            return None
        self.stale = self._heard + self._timeout_s <= now
        if self.attached and not self.stale:
            self._next = now + self._heartbeat_s
            self._pings += 1
            return Ping(number=self._pings)
        if self.stale:
            self._heard = now
        self.attached = False
        self._next = self._backoff.next(now)
        return self._attach

    def receive(self, message: Attached | Refuse | Pong, now: float) -> None:
        """Handle the stage's answer."""
        self._heard = now
        if isinstance(message, Attached):
            self.attached = True
            self._backoff.reset()
            self._next = now + self._heartbeat_s
        elif isinstance(message, Refuse) and self.attached and message.code == "no_session":
            self.attached = False
            self._next = now

    def lost(self, now: float) -> None:
        """Note that the connection was replaced."""
        self.attached = False
        self._next = self._backoff.next(now)

    def heard(self, now: float) -> None:
        """Note that a chunk has come."""
        self._heard = now

    def next_deadline(self) -> float:
        """When tick() has to be called next."""
        return self._next
