"""Copies of KV pages that are under way between the pool and the tiers, how fast they are, and what may be written."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.core.config import SchedulerConfig
from headrace.core.types.kv.kv_tiers import TIERS, PageHeader, Tier, TierTokens
from headrace.core.types.packed import unpack
from headrace.scheduler.kv.node import PageCopy

SMOOTHING = 0.2  # weight of the newest copy in the speed of a tier
FORGIVEN = 0.01  # share of its slowness that is forgotten when a tier is found too slow, so that it is tried again
DAY_S = 86_400
GIB = 1 << 30


@dataclass(slots=True, eq=False)
class PendingCopy:
    """One copy operation, which the stages have been ordered to perform by one or more orders."""

    copy: PageCopy
    began: float
    waiting: set[tuple[int, int]] = field(default_factory=set)
    """(order, stage) of the answers to come."""

    failed: set[int] = field(default_factory=set)
    """Indices of pages that some stage could not copy."""


class CopyTable:
    """The copy operations under way, by the number of their orders."""

    def __init__(self, config: SchedulerConfig, stages: Sequence[int]) -> None:
        """stages: ranks that copy."""
        self._stages = stages
        self._orders: dict[int, tuple[PendingCopy, int]] = {}  # with the index of the order's first page
        self._page_s: dict[Tier, float] = {}
        self._daily_bytes = config.disk_write_gib_per_day * GIB
        self._written = dict.fromkeys(self._stages, 0.0)
        self._written_at = 0.0
        self._found: dict[int, dict[int, PageHeader]] = {}
        self._complete: set[int] = set()

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, pending: PendingCopy, seq: int, first: int) -> None:
        """An order of an operation has been given; first: index in the operation of the order's first page."""
        self._orders[seq] = (pending, first)
        pending.waiting.update((seq, stage) for stage in self._stages)

    def answered(self, seq: int, stage: int, failed: bytes) -> PendingCopy | None:
        """A stage has answered an order. Returns the operation, None if the answer was not expected."""
        pending, first = self._orders.get(seq, (None, 0))
        if pending is None or (seq, stage) not in pending.waiting:
            return None
        pending.waiting.discard((seq, stage))
        pending.failed.update(first + index for index in unpack(failed))
        if not any(order == seq for order, _ in pending.waiting):
            del self._orders[seq]
        return pending

    def silent(self) -> int:
        """A stage that has not answered the oldest order."""
        seq, (pending, _) = next(iter(self._orders.items()))
        return min((stage for order, stage in pending.waiting if order == seq), default=0)

    def clear(self) -> None:
        """The stages are gone, and what they were copying. Measured speeds and written bytes stay."""
        self._orders.clear()
        self._found.clear()
        self._complete.clear()

    def measured(self, tier: Tier, pages: int, seconds: float) -> None:
        """So many pages were loaded from a tier in so many seconds."""
        newest = seconds / max(1, pages)
        before = self._page_s.get(tier, newest)
        self._page_s[tier] = before + SMOOTHING * (newest - before)

    def worthwhile(self, tiers: Sequence[Tier], compute_s: Callable[[int], float]) -> int:
        """How many pages to load of a path, by their tiers: all of them if that is faster than computing, else those of
        the nearest tier alone if that is. compute_s: seconds of computing so many pages."""
        nearest = next((index for index, tier in enumerate(tiers) if tier != tiers[0]), len(tiers))
        for count in (len(tiers), nearest):
            if sum(self._page_s.get(tier, 0.0) for tier in tiers[:count]) <= compute_s(count):
                return count
        for tier in set(tiers):
            self._page_s[tier] = self._page_s.get(tier, 0.0) * (1 - FORGIVEN)
        return 0

    def load_s(self, tokens: TierTokens, page_size: int) -> float:
        """Predicted seconds of loading so many tokens; those of a tier that nothing was loaded from take none."""
        counts = zip(TIERS, (tokens.host, tokens.disk, tokens.library), strict=True)
        return sum(self._page_s.get(tier, 0.0) * count for tier, count in counts) / page_size

    def written(self, stage: int, count: int) -> None:
        """A stage has written so many bytes to its disk tier."""
        self._written[stage] += count

    def may_write(self, now: float) -> bool:
        """Whether the daily budget of disk writes is not used up. It is refilled all the time."""
        if not self._daily_bytes:
            return True
        refill = (now - self._written_at) * self._daily_bytes / DAY_S
        self._written_at = now
        for stage, written in self._written.items():
            self._written[stage] = max(0.0, written - refill)
        return max(self._written.values()) < self._daily_bytes

    def found(self, stage: int, slots: Iterable[int], headers: Iterable[PageHeader], last: bool) -> None:
        """A stage has found pages on its disk."""
        self._found.setdefault(stage, {}).update(zip(slots, headers, strict=True))
        if last:
            self._complete.add(stage)

    def take_found(self, slots: int) -> tuple[list[tuple[int, PageHeader]], list[int]] | None:
        """What is on the disk of every stage alike, in the first slots, and the other slots that hold something on some
        stage. None until every stage has said what it has found."""
        if len(self._complete) < len(self._stages):
            return None
        parts = list(self._found.values())
        alike = {
            slot: header
            for slot, header in (parts[0] if parts else {}).items()
            if 0 <= slot < slots and all(_same_page(part.get(slot), header) for part in parts)
        }
        others = sorted({slot for part in parts for slot in part} - alike.keys())
        self._found.clear()
        self._complete.clear()
        return sorted(alike.items()), others

    def pending(self) -> Iterator[PendingCopy]:
        """The operations under way, each once."""
        return iter({id(pending): pending for pending, _ in self._orders.values()}.values())


def _same_page(one: PageHeader | None, other: PageHeader) -> bool:
    return one is not None and (one.digest, one.parent, one.salt) == (other.digest, other.parent, other.salt)
