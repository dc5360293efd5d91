"""Say a thing once in a while, however often it happens: for logs that others can cause to be written."""

EVERY_S = 60.0
REMEMBERED = 1024


class LogThrottle:
    """Remembers what was said within the last every_s seconds, of so many things at most. Pure."""

    def __init__(self, every_s: float = EVERY_S, remembered: int = REMEMBERED) -> None:
        self._every_s = every_s
        self._remembered = remembered
        self._said: dict[str, float] = {}  # oldest first

    def due(self, about: str, now: float) -> bool:
        """Whether to say it now; if so it counts as said."""
        last = self._said.get(about)
        if last is not None and now - last < self._every_s:
            return False
        self._said.pop(about, None)
        self._said[about] = now
        if len(self._said) > self._remembered:
            del self._said[next(iter(self._said))]
        return True


def printable(text: str) -> str:
    """Somebody else's words in one line, without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
