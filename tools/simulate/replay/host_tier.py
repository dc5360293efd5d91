"""Host tier without memory, in virtual time: copies take what a rate says, in both directions at once.

StorePages   when the passes ordered before it are computed, and the stores before it are done ─► PagesStored
LoadPages    when the loads before it are done ─────────────────────────────────────────────────► PagesLoaded
"""

from collections.abc import Callable

from headrace.core.messages.orders import LoadPages, StorePages
from headrace.core.messages.stage_events import AnyStageEvent, PagesLoaded, PagesStored
from headrace.core.types.packed import ITEM_BYTES
from headrace.testing.world import World


class TimedHostTier:
    """The host tiers of all stages of a replica, which copy at the same time."""

    def __init__(
        self, world: World, stages: int, page_size: int, tokens_s: float | None, report: Callable[[AnyStageEvent], None]
    ) -> None:
        """tokens_s: tokens a second whose KV is copied in each direction; None: at once. report: takes the stages'
        events."""
        self._world = world
        self._stages = range(stages)
        self._token_s = 0.0 if tokens_s is None else 1 / tokens_s
        self._page_size = page_size
        self._report = report
        self._stored_at = 0.0
        self._loaded_at = 0.0

    def store(self, order: StorePages, computed_at: float) -> None:
        """Copy pages out of the pool. computed_at: when the passes ordered before are computed."""
        self._stored_at = max(self._world.now, computed_at, self._stored_at) + self._seconds(order.slots)
        self._answer(self._stored_at, [PagesStored(stage=stage, seq=order.seq) for stage in self._stages])

    def load(self, order: LoadPages) -> None:
        """Copy pages into the pool."""
        self._loaded_at = max(self._world.now, self._loaded_at) + self._seconds(order.slots)
        self._answer(self._loaded_at, [PagesLoaded(stage=stage, seq=order.seq) for stage in self._stages])

    def _seconds(self, slots: bytes) -> float:
        return len(slots) // ITEM_BYTES * self._page_size * self._token_s

    def _answer(self, at: float, events: list[AnyStageEvent]) -> None:
        for event in events:
            self._world.at(at, lambda event=event: self._report(event))  # type: ignore[misc]
