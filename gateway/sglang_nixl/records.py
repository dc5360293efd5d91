"""Records of rooms, and the effects of their state machine."""

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import FirstToken
from headrace.gateway.sglang_nixl.decode_rank import RankWrite
from headrace.gateway.sglang_nixl.wire import Address, RoomTarget
from headrace.peer.commands import CancelLoad, Loaded, LoadKv, ReleaseLoad, RenewLease, TicketRef


class RoomLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of rooms, in seconds, and their number."""

    bootstrap_s: float = 300.0
    """A room fails after so long with one of its two sides."""
    write_s: float = 30.0
    """And after so long of writing without an end."""
    forget_s: float = 60.0
    """How long a failed room is remembered for the side that has not come yet."""
    rooms: int = 4096
    """Rooms that have not ended; as many that have are remembered."""
    ranks: int = 1024
    """Decode ranks that may be registered."""


class HeldPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's KV that a prefill server holds."""

    ticket: TicketRef
    tokens: int
    prompt_hash: str = ""


class WriteKv(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: write the KV of tokens that begin with a page of the pool. Answered by RoomTable.written()."""

    load: str
    first_page: int
    tokens: int
    ranks: tuple[RankWrite, ...]


class WriteRow(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: write the metadata row; first_page is that of the room in the pool. Answered by RoomTable.written()."""

    load: str
    room: int
    first_page: int
    first: FirstToken
    ranks: tuple[RankWrite, ...]


class StopWrites(msgspec.Struct, frozen=True):
    """Effect: end all writing to these ranks, so that no byte arrives there any more once it has been applied. Writes
    of other rooms to them are reported as lost."""

    agents: tuple[str, ...]


class Tell(msgspec.Struct, frozen=True):
    """Effect: send a message to a decode rank."""

    address: Address
    frames: tuple[bytes, ...]


class RoomEnded(msgspec.Struct, frozen=True):
    """Effect: answer to RoomTable.expect()."""

    request: str
    error: ErrorInfo | None


Effect = LoadKv | CancelLoad | ReleaseLoad | RenewLease | WriteKv | WriteRow | StopWrites | Tell | RoomEnded


class RoomPhase(Enum):
    """Phases of a RoomRecord; the transitions are drawn in rooms.py."""

    WAITING = auto()  # for the request, its KV at the prefill server, or the decode ranks
    LOADING = auto()  # KV is on its way into the pool
    WRITING = auto()  # KV is on its way to the decode ranks
    LANDING = auto()  # the metadata row is
    ENDED = auto()  # failed, and remembered for the side that has not come yet


@dataclass(slots=True)
class RoomRecord:
    """One room. Times are seconds of the monotonic clock."""

    number: int
    load: str  # names its KV towards the peer thread; never used again
    deadline: float
    phase: RoomPhase = RoomPhase.WAITING
    request: str = ""  # of the HTTP side; "" while it has not come
    held: HeldPrompt | None = None
    targets: dict[str, RoomTarget] = field(default_factory=dict)  # by agent
    loaded: Loaded | None = None
    acks: dict[Address, int] = field(default_factory=dict)  # ranks that aborted, and the generations that they named
    error: ErrorInfo | None = None  # why it will end, or has ended
    host: str = ""  # of the decode engine that opened it, before its request had come; "" if that came first

    @property
    def complete(self) -> bool:
        """Whether all decode ranks have come."""
        return bool(self.targets) and len(self.targets) >= max(target.ranks for target in self.targets.values())

    @property
    def writing(self) -> bool:
        """Whether bytes may be on their way to decode ranks."""
        return self.phase in (RoomPhase.WRITING, RoomPhase.LANDING)
