"""Token buckets: rates that a remote process may use up, with a burst. Pure."""

BUCKETS_KEPT = 4096


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
