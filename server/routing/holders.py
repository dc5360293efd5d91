"""Which replicas hold which pages: from their KV events, and for a while from the prompts that were sent to them.

stored, removed   a page is in a tier of the replica, or left it
sent              the pages of a prompt will be in its pool; forgotten after SENT_S unless an event has confirmed them
clear             the replica is another one, or its cache is empty

Replicas evict the ends of prefixes first: one that holds a page holds all pages before it, in some tier.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.core.messages.kv_events import Medium

SENT_S = 300.0  # P90 of the time to the next turn of a conversation is 480 s, P50 120 s
MAX_PAGES = 1 << 18  # of one replica, of either source; the oldest are forgotten
TIER_BITS: Final[dict[Medium, int]] = {"GPU": 1, "CPU": 2, "DISK": 4}


class HolderIndex:
    """Replicas by page. Replicas are numbers from 0; pages are 64-bit names. Time comes in as an argument."""

    def __init__(self, sent_s: float = SENT_S) -> None:
        self._sent_s = sent_s
        self._masks: dict[int, int] = {}  # by page: bit R is set while replica R holds it
        self._tiers: dict[int, dict[int, int]] = {}  # by replica: page -> tiers that have it
        self._sent: dict[int, dict[int, float]] = {}  # by replica: page -> when to forget it, soonest first

    def stored(self, replica: int, pages: Sequence[int], medium: Medium) -> None:
        """These pages are in a tier of the replica."""
        tiers = self._tiers.setdefault(replica, {})
        for page in pages:
            tiers[page] = tiers.get(page, 0) | TIER_BITS[medium]
            self._masks[page] = self._masks.get(page, 0) | 1 << replica
        while len(tiers) > MAX_PAGES:
            self._drop_tiers(replica, next(iter(tiers)))

    def removed(self, replica: int, pages: Sequence[int], medium: Medium) -> None:
        """These pages left a tier of the replica."""
        tiers, sent = self._tiers.get(replica, {}), self._sent.get(replica, {})
        for page in pages:
            left = tiers.get(page, 0) & ~TIER_BITS[medium]
            if medium == "GPU" or not left:
                sent.pop(page, None)
            if left:
                tiers[page] = left
            else:
                self._drop_tiers(replica, page)

    def sent(self, replica: int, pages: Sequence[int], now: float) -> list[int]:
        """A prompt with these pages was sent to the replica. Returns those that it was not known to hold."""
        sent = self._sent.setdefault(replica, {})
        new = [page for page in pages if not self._masks.get(page, 0) >> replica & 1]
        for page in pages:
            sent.pop(page, None)
            sent[page] = now + self._sent_s
            self._masks[page] = self._masks.get(page, 0) | 1 << replica
        self.expire(replica, now)
        return new

    def forget(self, replica: int, pages: Sequence[int]) -> None:
        """The prompt that these pages were sent with does not come."""
        sent = self._sent.get(replica, {})
        for page in pages:
            if sent.pop(page, None) is not None:
                self._unmark(replica, page)

    def expire(self, replica: int, now: float) -> None:
        """Forget pages of prompts that were sent long ago."""
        sent = self._sent.get(replica, {})
        while sent:
            page = next(iter(sent))
            if sent[page] > now and len(sent) <= MAX_PAGES:
                break
            del sent[page]
            self._unmark(replica, page)

    def clear(self, replica: int) -> None:
        """Forget all pages of the replica."""
        pages = {**self._tiers.pop(replica, {}), **self._sent.pop(replica, {})}
        for page in pages:
            self._unmark(replica, page)

    def prefixes(self, pages: Sequence[int], allowed: int) -> Iterator[tuple[int, list[int]]]:
        """Lengths of held prefixes in pages, longest first, each with the replicas that hold no longer one. Bit R of
        allowed: replica R is looked for."""
        for number in range(len(pages) - 1, -1, -1):
            found = self._masks.get(pages[number], 0) & allowed
            if found:
                allowed &= ~found
                yield number + 1, _numbers(found)
            if not allowed:
                return

    def tier_pages(self, replica: int, pages: Sequence[int]) -> tuple[int, int]:
        """How many of these pages the replica has to load from its host tier, and how many from its disk tier."""
        tiers, sent = self._tiers.get(replica, {}), self._sent.get(replica, {})
        host = disk = 0
        for page in pages:
            found = 0 if page in sent else tiers.get(page, 0)
            if found and not found & TIER_BITS["GPU"]:
                if found & TIER_BITS["CPU"]:
                    host += 1
                else:
                    disk += 1
        return host, disk

    def __len__(self) -> int:
        return len(self._masks)

    def _drop_tiers(self, replica: int, page: int) -> None:
        self._tiers.get(replica, {}).pop(page, None)
        self._unmark(replica, page)

    def _unmark(self, replica: int, page: int) -> None:
        """The replica does not hold the page, unless the other source says so."""
        if page in self._tiers.get(replica, {}) or page in self._sent.get(replica, {}):
            return
        left = self._masks.get(page, 0) & ~(1 << replica)
        if left:
            self._masks[page] = left
        else:
            self._masks.pop(page, None)


def _numbers(mask: int) -> list[int]:
    """The bits that are set, ascending."""
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
