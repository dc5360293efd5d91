"""The scheduler's event loop: the only place where the pure scheduler meets sockets and time.

                  ┌───────────────────────── one turn ─────────────────────────┐
front end      ──►│                                                            │──► front end
stages         ──►│ wait ─► receive ─► handle(event) ─► plan while credits     │──► stages (orders)
control server ──►│  (sockets readable,        └─► apply effects in order      │──► control server
control client ──►│   or next deadline)                                        │──► control client
forecaster     ──►│                                                            │──► forecaster (with --promise)
                  │                                                            │──► publisher (KV events)
                  └────────────────────────────────────────────────────────────┘

Nothing in a turn blocks but the wait. Applying an effect may bring events (a source that closes a session, say); they
are handled in the same turn.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from headrace.core.messages.forecasts import MakeForecast
from headrace.core.messages.frontend import Shutdown
from headrace.core.messages.kv_events import KvEvent
from headrace.core.messages.orders import Order
from headrace.core.messages.peers import ControlClientEffect, ControlServerEffect
from headrace.core.messages.replies import SchedulerReply
from headrace.core.runtime.clock import LoopClock
from headrace.core.runtime.event_loop import EventLoop, EventSource, is_due
from headrace.scheduler.recording.recorder import FlightRecorder
from headrace.scheduler.scheduler import Effect, Event, Scheduler

log = logging.getLogger(__name__)

AnySource = EventSource[Any, Any]  # of one kind of event each


class SchedulerLoop:
    """Feeds the events of all sources to one Scheduler, and applies the effects that it decides on.

    front takes SchedulerReply effects, stages take Orders, control_server and control_client their own effects,
    publisher KvEvents, forecaster MakeForecast. The last four may be absent; an effect for an absent one is a
    programming error and raises TypeError. observe sees every event before it is handled.
    A FlightRecorder is a Scheduler whose calls are recorded.

    Time is that in which this loop ran (LoopClock): after a pause, of this process or of the machine, no peer and no
    stage is judged by what could not be read meanwhile.
    """

    def __init__(
        self,
        scheduler: Scheduler | FlightRecorder,
        *,
        front: AnySource,
        stages: AnySource,
        control_server: AnySource | None,
        control_client: AnySource | None,
        publisher: AnySource | None,
        forecaster: AnySource | None = None,
        clock: LoopClock,
        observe: Callable[[Event], None] = lambda _event: None,
    ) -> None:
        self._scheduler = scheduler
        self._front = front
        self._stages = stages
        self._control_server = control_server
        self._control_client = control_client
        self._publisher = publisher
        self._forecaster = forecaster
        recorder = scheduler.source if isinstance(scheduler, FlightRecorder) else None
        sources = (front, stages, control_server, control_client, publisher, forecaster, recorder)
        self._clock = clock
        self._loop = EventLoop([source for source in sources if source is not None], zmq.Poller, clock, clock.wait)
        self._observe = observe
        self._stopping = False

    def run(self) -> None:
        """Turn until Shutdown has been handled."""
        self._apply(self._scheduler.tick(self._clock.now()))
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """Wait for events or the next deadline, handle them, and plan while the pipeline has credits."""
        self._loop.wait(deadlines=[self._scheduler.next_deadline()])
        for _, events in self._loop.events():
            for event in events:
                self._handle(event)
        if is_due(self._scheduler.next_deadline(), self._clock.now()):
            self._apply(self._scheduler.tick(self._clock.now()))
        while effects := self._scheduler.plan(self._clock.now()):
            self._apply(effects)

    def _handle(self, event: Event) -> None:
        """Handle one event, at the time of now: the scheduler's time never runs backwards."""
        if isinstance(event, Shutdown):
            self._stopping = True
        self._observe(event)
        self._apply(self._scheduler.handle(event, self._clock.now()))

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Apply effects in order, and handle the events that applying them brings."""
        pending: deque[Effect] = deque(effects)
        while pending:
            effect = pending.popleft()
            now = self._clock.now()
            for event in self._source_for(effect).apply(effect, now):
                self._observe(event)
                pending.extend(self._scheduler.handle(event, now))

    def _source_for(self, effect: Effect) -> AnySource:
        if isinstance(effect, Order):
            return self._stages
        if isinstance(effect, SchedulerReply):
            return self._front
        if isinstance(effect, ControlServerEffect) and self._control_server is not None:
            return self._control_server
        if isinstance(effect, ControlClientEffect) and self._control_client is not None:
            return self._control_client
        if isinstance(effect, KvEvent) and self._publisher is not None:
            return self._publisher
        if isinstance(effect, MakeForecast) and self._forecaster is not None:
            return self._forecaster
        raise TypeError(f"no source takes a {type(effect).__name__} in this role")
