"""Rate-limits log lines that remote peers can trigger."""

EVERY_S = 60.0
REMEMBERED = 1024


class LogThrottle:
    """Lets each distinct text through once in every_s seconds. Remembers a bounded number of texts. Pure."""

    def __init__(self, every_s: float = EVERY_S, remembered: int = REMEMBERED) -> None:
        self._every_s = every_s
        self._remembered = remembered
        self._logged_at: dict[str, float] = {}  # oldest first

    def due(self, text: str, now: float) -> bool:
        """Whether to log the text now; if so, the interval begins anew."""
        last = self._logged_at.get(text)
        if last is not None and now - last < self._every_s:
            return False
        self._logged_at.pop(text, None)
        self._logged_at[text] = now
        if len(self._logged_at) > self._remembered:
            del self._logged_at[next(iter(self._logged_at))]
        return True


def printable(text: str) -> str:
    """Text from a peer as one line for a log: control characters and terminal escapes are written as \\xNN."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
