"""Reports how far a rank is with loading: about once a second to the scheduler, and every few seconds to the log."""

import logging
import threading
from collections.abc import Callable

from headrace.core.messages.stage_events import StageLoading
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.progress import LoadProgress

log = logging.getLogger(__name__)

PERIOD_S = 1.0
LOG_S = 5.0
EARLY = 0.02  # share of the weights before which the time that is left is not known


class LoadingReport:
    """A thread that reports while its context lasts. send: called by that thread only."""

    def __init__(
        self,
        progress: LoadProgress,
        send: Callable[[StageLoading], None],
        clock: Clock,
        *,
        rank: int,
        epoch: int,
        period_s: float = PERIOD_S,
    ) -> None:
        self._progress = progress
        self._send = send
        self._clock = clock
        self._rank = rank
        self._epoch = epoch
        self._period_s = period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load report", daemon=True)
        self._began: float | None = None  # to read weights
        self._logged = clock.now()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            if self._progress.total_bytes:
                self.report(self._clock.now())

    def report(self, now: float) -> None:
        """Report once."""
        state = self.state(now)
        self._send(state)
        if now - self._logged >= LOG_S:
            self._logged = now
            log.info("%s", state)

    def state(self, now: float) -> StageLoading:
        """How far it is."""
        progress = self._progress
        self._began = now if self._began is None else self._began
        done, total = progress.done_bytes, progress.total_bytes
        passed = now - self._began
        known = passed > 0 and done > EARLY * total
        return StageLoading(
            stage=self._rank,
            epoch=self._epoch,
            done_bytes=done,
            total_bytes=total,
            left_s=passed * (total - done) / done if known else None,
            loaded=progress.loaded,
        )
