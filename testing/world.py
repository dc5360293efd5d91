"""Virtual time for simulators: that of the scheduler's twin, and channels with random delays."""

from collections.abc import Callable

from headrace.scheduler.twin.world import SchedulerDriver, World

__all__ = ["Channel", "SchedulerDriver", "World"]


class Channel:
    """Delivers in order, after random delays. Channels overtake each other."""

    def __init__(self, world: World, mean_s: float) -> None:
        self._world = world
        self._mean_s = mean_s
        self._last = 0.0

    def put(self, deliver: Callable[[], None]) -> None:
        """Call deliver after a delay, and after all that was put before."""
        delay = self._world.random.expovariate(1 / self._mean_s)
        self._last = max(self._last, self._world.now + delay)
        self._world.at(self._last, deliver)
