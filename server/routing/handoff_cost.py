"""What handing over adds to a prefill server's own time, learnt from the handoffs that were done.

    added = time from the prompt's posting to its first token here  -  queue and computing at the prefill server
          ≈ a + b · tokens sent     requests and the last chunk; a link that is slower than computing

Least squares over recent handoffs, forgetting; neither coefficient is below zero.
"""

from collections.abc import Callable

FORGETTING = 0.95  # weight of a handoff when the next one comes
FORGET_S = 60.0


class HandoffCost:
    """The handoffs of one prefill server. Nothing is added while none is known."""

    def __init__(self) -> None:
        self._count = self._tokens = self._squares = self._seconds = self._products = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A handoff of the KV of so many tokens has added so many seconds."""
        seconds = max(0.0, seconds)
        self._count = FORGETTING * self._count + 1
        self._tokens = FORGETTING * self._tokens + tokens
        self._squares = FORGETTING * self._squares + tokens * tokens
        self._seconds = FORGETTING * self._seconds + seconds
        self._products = FORGETTING * self._products + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """What a handoff of so many tokens is expected to add."""
        if not self._count:
            return 0.0
        spread = self._count * self._squares - self._tokens**2
        slope = (self._count * self._products - self._tokens * self._seconds) / spread if spread > 0 else 0.0
        slope = min(max(0.0, slope), self._seconds / self._tokens if self._tokens else 0.0)
        return (self._seconds - slope * self._tokens) / self._count + slope * tokens


class TransferCosts:
    """The transfers from several servers, each by its name. What was learnt of one is forgotten FORGET_S after its last
    transfer: one that was slow once would never be tried again."""

    def __init__(self, now: Callable[[], float]) -> None:
        """now: seconds of a monotonic clock."""
        self._now = now
        self._costs: dict[str, HandoffCost] = {}
        self._observed_at: dict[str, float] = {}

    def observe(self, server: str, tokens: int, seconds: float) -> None:
        """The KV of so many tokens has come from a server in so many seconds."""
        self._costs.setdefault(server, HandoffCost()).observe(tokens, seconds)
        self._observed_at[server] = self._now()

    def seconds(self, server: str, tokens: int) -> float:
        """What a transfer of so many tokens is expected to take; 0.0 if nothing is known of the server."""
        cost = self._costs.get(server)
        if cost is None or self._now() - self._observed_at[server] >= FORGET_S:
            return 0.0
        return cost.seconds(tokens)
