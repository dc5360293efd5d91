"""What the servers of simulated schedules decide."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from headrace.scheduler.scheduler import Effect
from headrace.testing.server import SimulatedServer


@contextmanager
def recording() -> Iterator[list[Effect]]:
    """All effects of all servers meanwhile, in order."""
    seen: list[Effect] = []
    perform = SimulatedServer._perform

    def keep(server: SimulatedServer, effect: Effect) -> None:
        seen.append(effect)
        perform(server, effect)

    with patch.object(SimulatedServer, "_perform", keep):
        yield seen
