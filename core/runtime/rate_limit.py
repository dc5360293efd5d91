"""Limits on how often something happens: token buckets, back-off between attempts, a throttle of log lines. Pure.

They bound what a remote process can cause, its texts in a log (printable()) included.
"""

BUCKETS_KEPT = 4096
EVERY_S = 60.0
REMEMBERED = 1024


class TokenBucket:
    """Allows `per_s` events a second on average, and `burst` at once."""

    def __init__(self, now: float, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._last = now

    def exceeded(self, now: float, events: int = 1) -> bool:
        """Count events that came together. True when there were too many."""
        self._left = max(-1.0, min(self._burst, self._left + (now - self._last) * self._per_s) - events)
        self._last = now
        return self._left < 0


class RateLimits:
    """One token bucket for each key, for example each connection. The oldest of more than BUCKETS_KEPT is dropped."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: dict[bytes, TokenBucket] = {}  # the oldest first

    def allowed(self, key: bytes, now: float) -> bool:
        """Count an event of this key. False when it has had too many."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(now, self._per_s, self._burst)
            if len(self._buckets) > BUCKETS_KEPT:
                del self._buckets[next(iter(self._buckets))]
        return not bucket.exceeded(now)


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


class LogThrottle:
    """Lets each distinct text through once in every_s seconds. Remembers a bounded number of texts. Pure."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._logged_at: dict[str, float] = {}  # oldest first

    def due(self, text: str, now: float) -> bool:
        """Whether to log the text now; if so, the interval begins anew."""
        last = self._logged_at.get(text)
        if last is not None and now - last < self._every_s:
            return False
        self._logged_at.pop(text, None)
        self._logged_at[text] = now
        if len(self._logged_at) > REMEMBERED:
            del self._logged_at[next(iter(self._logged_at))]
        return True


def printable(text: str) -> str:
    """Text from a peer as one line for a log: control characters and terminal escapes are written as \\xNN."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
