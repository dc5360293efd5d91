"""Counters of a stage's host and disk tiers."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters, Stats
from headrace.core.types.kv.kv_tiers import DISK, Tier
from headrace.engine.kv.tiers.scan import IGNORED, Ignored
from headrace.engine.kv.tiers.store import FAILURES, TierError

log = logging.getLogger(__name__)

Direction = Literal["store", "load"]
DIRECTIONS: tuple[Direction, ...] = ("store", "load")


class TierStatistics:
    """Bytes, seconds and failures of copies, by tier and direction, and pages on disk that are not used. Any thread."""

    def __init__(self, stage: int, tiers: Sequence[Tier]) -> None:
        """stage: pipeline rank, the first label. tiers: those that the stage has; their counters start at 0."""
        self._stage = str(stage)
        self._counters = Counters()
        self._lock = threading.Lock()
        self._throttle = LogThrottle()
        for tier in tiers:
            for direction in DIRECTIONS:
                self._add_copy(direction, tier, 0, 0.0)
                for reason in FAILURES:
                    self._counters.add("stage_tier_failures_total", 0.0, (self._stage, tier, direction, reason))
        if DISK in tiers:
            self.scanned(dict.fromkeys(IGNORED, 0))

    def copied(self, direction: Direction, tier: Tier, size: int, seconds: float) -> None:
        """Count the copy of a page."""
        with self._lock:
            self._add_copy(direction, tier, size, seconds)

    def failed(self, direction: Direction, tier: Tier, error: TierError) -> None:
        """Count a page that could not be stored or loaded, and log it now and then."""
        if self._throttle.due(f"{tier} {direction} {error.reason}", time.monotonic()):
            log.warning("%s of a KV page failed: %s", direction, error)
        with self._lock:
            self._counters.add("stage_tier_failures_total", 1.0, (self._stage, tier, direction, error.reason))

    def scanned(self, ignored: Mapping[Ignored, int]) -> None:
        """Count pages and files on disk that are not used, by reason."""
        with self._lock:
            for reason, count in ignored.items():
                self._counters.add("stage_disk_ignored_total", count, (self._stage, reason))

    def snapshot(self) -> Stats:
        """All counters."""
        with self._lock:
            return Stats(self._counters.snapshot())

    def _add_copy(self, direction: Direction, tier: Tier, size: int, seconds: float) -> None:
        labels = (self._stage, tier, direction)
        self._counters.add("stage_tier_bytes_total", size, labels)
        self._counters.add("stage_tier_seconds_total", seconds, labels)
