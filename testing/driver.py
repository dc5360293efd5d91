"""Drives one Scheduler in virtual time, as scheduler/loop.py does in real time."""

from collections.abc import Callable

from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.testing.world import World


class SchedulerDriver:
    """Feeds events to a Scheduler, plans while it has credits, and calls tick() at its deadlines."""

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
