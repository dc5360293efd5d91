"""How often a turn of a conversation is followed by another one, and an evicted page is needed again: as counted here.

Turns are told apart as for eviction (eviction.py): by their number, and a short first prompt from a long one. What was
counted long ago fades, since counts are halved when they have become large.
"""

from headrace.scheduler.kv.eviction import MAX_TURN

FADES = 1024  # turns, or evicted pages in thousands, after which counts are halved
PAGES = 1024


class _Share:
    """A share of what was counted; one half before anything was."""

    def __init__(self, most: int, prior: int = 1) -> None:
        self._most = most
        self._prior = prior
        self._all = self._hits = 0

    def add(self, count: int = 1) -> None:
        self._all += count
        if self._all > self._most:
            self._all, self._hits = self._all // 2, self._hits // 2

    def hit(self, count: int = 1) -> None:
        self._hits += count

    @property
    def value(self) -> float:
        return min(1.0, (self._hits + self._prior) / (self._all + 2 * self._prior))


class TurnChances:
    """Counts the turns that begin, and pages that were evicted. short_tokens: see KvCache."""

    def __init__(self, short_tokens: int) -> None:
        self._short_tokens = short_tokens
        self._turns = [_Share(FADES) for _ in range(MAX_TURN + 1)]
        self._short = _Share(FADES)
        self._evicted = _Share(FADES * PAGES, prior=PAGES)

    def began(self, turn: int, known: int, length: int, again: int) -> None:
        """A prompt of this turn and length begins. known: its leading tokens that a turn before it had. again: pages
        of it that were evicted."""
        if turn > 0:
            self._of(turn - 1, known).hit()
        self._of(turn, length).add()
        self._evicted.hit(again)

    def evicted(self, pages: int) -> None:
        """So many pages have left the pool for others."""
        self._evicted.add(pages)

    def next_turn(self, turn: int, length: int) -> float:
        """Chance that a turn of so many tokens is followed by another one."""
        return self._of(turn, length).value

    @property
    def needed_again(self) -> float:
        """Chance that a page is needed after it was evicted."""
        return self._evicted.value

    def _of(self, turn: int, length: int) -> _Share:
        return self._short if turn == 0 and length <= self._short_tokens else self._turns[min(turn, MAX_TURN)]
