"""The simulated tiers of one stage: slots that are written and read late, and that fail, lie and are lost at random.

The location of a simulated KV file is its tokens (location_of()).

What a slot holds is checked when it is loaded, as by a checksum: a flipped bit is found, and reported as failed. A page
that is being loaded holds garbage until it is done, so that a plan that reads it too early samples other tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.core.messages.orders import CloseKvFile, DropPages, LoadPages, OpenKvFile, StorePages
from headrace.core.messages.stage_events import AnyStageEvent, PagesFound, PagesLoaded, PagesLost, PagesStored
from headrace.core.types.kv.kv_tiers import PageHeader, Tier
from headrace.core.types.packed import pack, unpack
from headrace.testing.world import Channel, World

GARBAGE = -77
HOST_S = 0.001  # mean time of a copy
DISK_S = 0.005
LIBRARY_S = 0.01


def location_of(tokens: Sequence[int]) -> str:
    """Of a simulated KV file with these tokens."""
    return pack(tokens).hex()


@dataclass(slots=True)
class SimulatedSlot:
    """The contents of a slot."""

    values: list[int]
    header: PageHeader | None = None
    flipped: bool = False
    """It is not what was written."""


@dataclass(slots=True)
class SimulatedDisk:
    """What survives the restart of a stage."""

    slots: dict[int, SimulatedSlot] = field(default_factory=dict)


class SimulatedTiers:
    """The tiers of a stage. Stores and drops are done in order, loads as well; loads overtake stores."""

    def __init__(
        self,
        world: World,
        stage: int,
        pool: list[list[int]],
        disk: SimulatedDisk,
        faults: float,
        report: Callable[[AnyStageEvent], None],
        kv_of: Callable[[Sequence[int]], list[int]],
    ) -> None:
        """faults: probability that a page cannot be stored or loaded, that it is flipped, or that it is lost. kv_of: KV
        of the tokens of a prompt."""
        self._world = world
        self._stage = stage
        self._pool = pool
        self._slots: dict[Tier, dict[int, SimulatedSlot]] = {"host": {}, "disk": disk.slots, "library": {}}
        self._kv_of = kv_of
        self._faults = faults
        self._report = report
        self._channels = {name: Channel(world, mean) for name, mean in (
            ("host", HOST_S), ("disk", DISK_S), ("load host", HOST_S), ("load disk", DISK_S),
            ("load library", LIBRARY_S))}  # fmt: skip
        self._files: dict[int, int] = {}  # pages of KV files, by first slot
        self.dead = False

    def scan(self) -> None:
        """Report what is on the disk, in one part or two."""
        slots = self._slots["disk"]
        known = [(slot, one.header) for slot, one in sorted(slots.items()) if one.header is not None]
        cut = len(known) // 2 if self._chance(0.5) else 0
        for part, last in ((known[:cut], False), (known[cut:], True)):
            if part or last:
                headers = tuple(header for _, header in part)
                self._report(PagesFound(stage=self._stage, slots=pack(s for s, _ in part), headers=headers, last=last))

    def execute(self, order: StorePages | LoadPages | DropPages | OpenKvFile | CloseKvFile) -> None:
        """Begin what is ordered."""
        match order:
            case OpenKvFile():
                self._open(order)
            case CloseKvFile():
                slots = self._slots["library"]
                for slot in range(order.first, order.first + self._files.pop(order.first)):
                    del slots[slot]
            case StorePages():
                self._channels[order.tier].put(lambda: self._store(order))
            case DropPages():
                self._channels[order.tier].put(lambda: self._drop(order))
            case LoadPages():
                for page in unpack(order.pages):
                    self._pool[page][:] = [GARBAGE] * len(self._pool[page])
                self._channels[f"load {order.tier}"].put(lambda: self._load(order))

    def _open(self, order: OpenKvFile) -> None:
        values = self._kv_of(unpack(bytes.fromhex(order.location)))
        size = len(values) // order.pages
        for index in range(order.pages):
            page = SimulatedSlot(values[index * size : (index + 1) * size], None, self._chance(self._faults))
            self._slots["library"][order.first + index] = page
        self._files[order.first] = order.pages

    def _store(self, order: StorePages) -> None:
        if self.dead:
            return
        failed = []
        for index, (page, slot) in enumerate(zip(unpack(order.sources), unpack(order.slots), strict=True)):
            if self._chance(self._faults):
                failed.append(index)
                continue
            values = list(self._pool[page])
            header = order.headers[index] if order.headers else None
            self._slots[order.tier][slot] = SimulatedSlot(values, header, self._chance(self._faults))
        self._report(PagesStored(stage=self._stage, seq=order.seq, failed=pack(failed), written_bytes=100))
        if order.tier == "disk" and self._chance(self._faults):
            self._lose()

    def _load(self, order: LoadPages) -> None:
        if self.dead:
            return
        failed = []
        for index, (slot, page) in enumerate(zip(unpack(order.slots), unpack(order.pages), strict=True)):
            held = self._slots[order.tier].get(slot)
            if held is None or held.flipped or self._chance(self._faults):
                failed.append(index)
            else:
                self._pool[page][:] = held.values
        self._report(PagesLoaded(stage=self._stage, seq=order.seq, failed=pack(failed)))

    def _drop(self, order: DropPages) -> None:
        if not self.dead:
            for slot in unpack(order.slots):
                self._slots[order.tier].pop(slot, None)

    def _lose(self) -> None:
        """Lose some slots of the disk, as when a segment is deleted."""
        disk = self._slots["disk"]
        lost = [slot for slot in sorted(disk) if self._chance(0.3)]
        for slot in lost:
            del disk[slot]
        self._report(PagesLost(stage=self._stage, tier="disk", slots=pack(lost)))

    def _chance(self, probability: float) -> bool:
        return self._world.random.random() < probability
