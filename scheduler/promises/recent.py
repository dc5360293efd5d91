"""What was seen in the last minutes: requests that arrived, how long peers took, how many tokens were generated.

The twin draws from it, so that its future is like the past: each kind is a bounded window, the oldest leave first.
"""

from collections import deque
from typing import NamedTuple

from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request

WINDOW_S = 300.0
"""Requests that came longer ago are not looked at."""

MOST_ARRIVALS = 4096
MOST_DURATIONS = 256


class RecentArrival(NamedTuple):
    """A request that was to be computed here, admitted or not."""

    at: float
    load: Load
    """What was to be computed of it."""

    priority: int
    objective_s: float | None
    tenant: str
    sends: bool
    """Its KV goes to a peer."""

    max_tokens: int
    """That it may generate here; 1 for one whose KV goes elsewhere."""


class Recent:
    """Windows of what was seen lately."""

    def __init__(self) -> None:
        self.arrivals: deque[RecentArrival] = deque(maxlen=MOST_ARRIVALS)
        self.generated: deque[int] = deque(maxlen=MOST_DURATIONS)
        """Tokens of requests that were decoded here to their end."""

        self.reserved_s: deque[float] = deque(maxlen=MOST_DURATIONS)
        """Seconds that prompts waited for their peer to reserve."""

        self.handed_over_s: deque[float] = deque(maxlen=MOST_DURATIONS)
        """Seconds from the first token to the last acknowledgement."""

    def finished(self, request: Request) -> None:
        """A request has ended well."""
        if request.decodes_here:
            self.generated.append(request.generated)
        elif request.outgoing is not None:
            self.reserved_s.append(request.spent.get(Phase.BOOTSTRAP, 0.0))
            self.handed_over_s.append(request.spent.get(Phase.INFLIGHT, 0.0))

    def stretch(self, now: float) -> tuple[list[RecentArrival], float]:
        """The arrivals in the window, and the seconds that it has been open."""
        while self.arrivals and self.arrivals[0].at < now - WINDOW_S:
            self.arrivals.popleft()
        found = list(self.arrivals)
        return found, now - found[0].at if found else 0.0
