"""Virtual time for the simulator: events at random times, by seed."""

import heapq
import random
from collections.abc import Callable


class World:
    """Virtual time, a random generator, and the actions that are scheduled."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""

        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run the action at this time."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, action))

    def after(self, mean_s: float, action: Callable[[], None]) -> None:
        """Run the action after a random delay of this mean."""
        self.at(self.delayed(mean_s), action)

    def delayed(self, mean_s: float) -> float:
        """A time after now, by a random delay of this mean."""
        return self.now + self.random.expovariate(1 / mean_s)

    def run(self, limit: int) -> bool:
        """Run all actions, in the order of their times; False when there are more than limit."""
        return any(not self.step() for _ in range(limit))

    def step(self) -> bool:
        """Run the next action; False when there is none."""
        if not self._heap:
            return False
        when, _, action = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        action()
        return True


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
