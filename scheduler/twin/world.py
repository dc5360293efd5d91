"""Virtual time: actions at times that are set or random, by seed, and a Scheduler that is driven in it."""

import heapq
import random
from collections.abc import Callable

from headrace.scheduler.scheduler import Effect, Event, Scheduler


class World:
    """Virtual time, a random generator, and the actions that are scheduled."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""

        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def next_at(self) -> float | None:
        """Time of the next action; None if there is none."""
        return self._heap[0][0] if self._heap else None

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


class SchedulerDriver:
    """Drives one Scheduler in virtual time, as scheduler/loop.py does in real time: feeds events to it, plans while it
    has credits, and calls tick() at its deadlines."""

    def __init__(self, world: World, scheduler: Scheduler, perform: Callable[[list[Effect]], None]) -> None:
        """perform: applies the effects of one call of the scheduler, in order."""
        self._world = world
        self.scheduler = scheduler
        """A test may put another one in its place, before the first event."""

        self._perform = perform
        self._tick_at: float | None = None

    def handle(self, event: Event) -> None:
        """Handle an event now, apply its effects and plan."""
        self._apply(self.scheduler.handle(event, self._world.now))

    def go_on(self) -> None:
        """Plan what can be planned now, and look at the deadlines: of a scheduler that has been driven by another."""
        self._apply([])

    def _apply(self, effects: list[Effect]) -> None:
        self._perform(effects)
        while effects := self.scheduler.plan(self._world.now):
            self._perform(effects)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        """Schedule tick() for the next deadline."""
        deadline = self.scheduler.next_deadline()
        if deadline is None or (self._tick_at is not None and self._tick_at <= deadline):
            return
        self._tick_at = deadline
        self._world.at(deadline, lambda: self._tick(deadline))

    def _tick(self, at: float) -> None:
        if self._tick_at != at:
            return  # an earlier tick has taken its place
        self._tick_at = None
        self._apply(self.scheduler.tick(self._world.now))
        self._schedule_tick()
