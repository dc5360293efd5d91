"""Pipeline bubbles: the time in which plans were in flight and a stage computed none of them.

    plans in flight      ├───────────────────────────────────┤
    stage 0 computes     ├[1][2][3]                          ┤    bubble: all the rest of the time
    stage 2 computes     ├          [1][2][3]                ┤

It makes no difference what a stage waits for. Its time is counted when it reports a plan, and when the last plan is
done: the time since its previous report, less the time that computing the plan took.
"""

from collections.abc import Sequence

from headrace.core.stats import Counters


class Bubbles:
    """Counts stage_bubble_seconds_total and pipeline_active_seconds_total."""

    def __init__(self, stages: Sequence[int], counters: Counters) -> None:
        """stages: ranks that report plans."""
        self._stages = stages
        self._counters = counters
        self._since: float | None = None  # how far the active time is counted; None: no plan is in flight
        self.reset()

    def reset(self) -> None:
        """Start over with other stages: the old ones report nothing any more."""
        self._since = None
        self._counted = dict.fromkeys(self._stages, 0.0)  # active seconds counted as bubble or compute
        self._active = 0.0

    def begin(self, now: float) -> None:
        """A plan is in flight, and before it none was."""
        self._since = now

    def computed(self, stage: int, seconds: float, now: float) -> None:
        """A stage reports a plan that it has computed in so many seconds. Its report may come after the end."""
        self._advance(now)
        self._count(stage, seconds)

    def end(self, now: float) -> None:
        """No plan is in flight any more."""
        self._advance(now)
        for stage in self._stages:
            self._count(stage, 0.0)
        self._since = None

    def _advance(self, now: float) -> None:
        if self._since is not None:
            self._counters.add("pipeline_active_seconds_total", now - self._since)
            self._active += now - self._since
            self._since = now

    def _count(self, stage: int, seconds: float) -> None:
        """Count the rest of the active time as a bubble. Messages are delayed, so a report may claim more time than has
        passed: the excess is taken off the next bubble."""
        bubble = max(0.0, self._active - self._counted[stage] - seconds)
        self._counted[stage] += seconds + bubble
        self._counters.add("stage_bubble_seconds_total", bubble, (str(stage),))
