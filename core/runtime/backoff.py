"""Exponential back-off between attempts. Pure."""


class Backoff:
    """Delays that grow by a factor from the first to the last one, and begin anew after a success."""

    def __init__(self, first_s: float, last_s: float, factor: float = 2.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._factor = factor
        self._delay_s = first_s

    def next_delay(self) -> float:
        """Seconds to wait before the next attempt. Each call returns a longer delay, up to the last one."""
        delay_s = self._delay_s
        self._delay_s = min(self._factor * delay_s, self._last_s)
        return delay_s

    def next(self, now: float) -> float:
        """When the next attempt is due."""
        return now + self.next_delay()

    def reset(self) -> None:
        """An attempt succeeded: the next delay is the first one again."""
        self._delay_s = self._first_s
