"""KV that a decode side fetches from a prefill server: one use of a ticket, and when its pages may go to others. Pure.

PrepareReceive ─► every stage: ReceivePrepared ─► AskReserve ─► chunks … ─► every stage: KvReceived
└────────────── PREPARING ──────────────────┘    └────── RESERVED ───────────────────────┘ └ RECEIVED

Both decode sides use it: the scheduler of a server that decodes here, whose stages answer from other processes, and the
peer library, whose one receiver is in its own thread. It is in core since neither may import the other, and what they
have in common is what the words of core mean; core has other such machines (shares, the agreement on a pass). What
differs between the two, and is theirs, is what surrounds a transfer:

    scheduler   a request waits for pages and a row; ends when every stage has confirmed CancelReceive; a silent prefill
                server is noticed by its session
    peer        a ticket is renewed before it is loaded; a silent load fails by itself; a ticket without a session is
                released once there is one

The rule of both is that pages are given to others only when `remote_writes` is False, and no receiver writes any more.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import AskCancel, AskReserve
from headrace.core.types.kv.backends import writes_directly
from headrace.core.types.packed import packed_length
from headrace.core.types.requests.reservation import Reservation

TransferKey = tuple[str, str, int]
"""Session, ticket, generation: one use of a ticket."""


class IncomingState(Enum):
    """How far the fetch of one request's KV is.

    PREPARING ──reserve()──► RESERVED ──receive()──► RECEIVED
        │                        │
        └── end(), lose() ───────┴─────────────────► ENDED
    """

    PREPARING = "preparing"  # our stages get ready to receive; the prefill server has not been asked
    RESERVED = "reserved"  # the prefill server has our page ids, and sends
    RECEIVED = "received"  # every stage has all of the KV
    ENDED = "ended"  # the prefill server has ended the ticket or its session: there is nothing left to cancel


class RemoteWriter(Enum):
    """Whether the prefill server itself may write into our pages (backends "cuda_ipc", "shm" and "nixl").

    IDLE ──reserve()──► WRITING ──receive(), end(), stop_writer()──► STOPPED
    """

    NONE = "none"  # chunks come as messages, which our own stages write
    IDLE = "idle"  # it has not been told our page ids
    WRITING = "writing"  # it may write into our pages at any time, whatever our stages are told
    STOPPED = "stopped"  # it has ended the ticket, has written all of it, or can reach our pool no more


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """KV that is fetched from a prefill server. Pages may be given to others only when `remote_writes` is False and no
    stage writes any more."""

    session: str
    reservation: Reservation
    """What the prefill server is asked for once our stages are ready. Its pages are those that are fetched; those found
    in the prefix cache are not."""

    unready: set[int]
    """Stages that have not answered PrepareReceive."""

    missing: set[int]
    """Stages whose KV has not arrived."""

    until: dict[int, int]
    """By stage: positions before this one are in its pool, without a gap."""

    writer: RemoteWriter
    state: IncomingState = IncomingState.PREPARING
    bytes: int = 0
    """Payload bytes that have arrived, over all stages."""

    chunks: int = 0
    """Chunks that have arrived, over all stages."""

    @classmethod
    def begin(cls, session: str, backend: str, reservation: Reservation, stages: Iterable[int]) -> "IncomingTransfer":
        """Pages and a row are leased. backend: of the session. stages: ours, each of which receives its part."""
        writer = RemoteWriter.IDLE if writes_directly(backend) else RemoteWriter.NONE
        ranks = set(stages)
        return cls(session, reservation, ranks, set(ranks), dict.fromkeys(ranks, reservation.cached_tokens), writer)

    @property
    def ticket(self) -> str:
        """The ticket that this is a use of."""
        return self.reservation.ticket

    @property
    def generation(self) -> int:
        """Which use of it this is."""
        return self.reservation.generation

    @property
    def key(self) -> TransferKey:
        """What the prefill server's messages name this transfer by."""
        return (self.session, self.reservation.ticket, self.reservation.generation)

    @property
    def pages(self) -> int:
        """Pages that are fetched."""
        return packed_length(self.reservation.pages)

    @property
    def leading(self) -> int:
        """Positions before this one are here, on every stage: those that were found, and what has come since."""
        return min(self.until.values())

    @property
    def remote_writes(self) -> bool:
        """The prefill server may write into our pages now."""
        return self.writer is RemoteWriter.WRITING

    def prepare(self, seq: int, request: int, *, prefix: bool = False) -> PrepareReceive:
        """The order for our stages, which comes first. request: the number that they know it by. prefix: as there."""
        wanted = self.reservation
        return PrepareReceive(
            seq=seq,
            request=request,
            session=self.session,
            ticket=wanted.ticket,
            generation=wanted.generation,
            start=wanted.cached_tokens,
            count=wanted.prompt_tokens - wanted.cached_tokens,
            pages=wanted.pages,
            row=wanted.row,
            slot=wanted.slot,
            draft=wanted.draft,
            prefix=prefix,
        )

    def prepared(self, stage: int) -> AskReserve | None:
        """A stage is ready to receive. Once every stage is, returns what to ask the prefill server for; a stage that
        has answered before changes nothing. Raises ValueError unless the transfer is being prepared."""
        if stage not in self.unready:
            return None
        self.unready.discard(stage)
        if self.unready:
            return None
        self.reserve()
        return AskReserve(session=self.session, reservation=self.reservation)

    def came(self, stage: int, until: int) -> None:
        """A stage has another chunk; see ChunkReceived.until."""
        self.until[stage] = min(max(self.until[stage], until), self.reservation.prompt_tokens)

    def arrived(self, stage: int, size: int, chunks: int) -> bool:
        """A stage has its KV, of size bytes; True once all have. Raises ValueError unless pages were reserved."""
        self.missing.discard(stage)
        self.bytes += size
        self.chunks += chunks
        if self.missing:
            return False
        self.receive()
        return True

    def ask_cancel(self, reason: str) -> AskCancel:
        """What to tell the prefill server when the KV is not wanted any more."""
        session, ticket, generation = self.key
        return AskCancel(session=session, ticket=ticket, generation=generation, reason=reason)

    def reserve(self) -> None:
        """The prefill server is told our page ids. Raises ValueError unless the transfer is being prepared."""
        self._leave(IncomingState.PREPARING)
        self.state = IncomingState.RESERVED
        if self.writer is RemoteWriter.IDLE:
            self.writer = RemoteWriter.WRITING

    def receive(self) -> None:
        """All of the KV is here. Raises ValueError unless pages were reserved."""
        self._leave(IncomingState.RESERVED)
        self.state = IncomingState.RECEIVED
        self.stop_writer()

    def end(self) -> None:
        """The prefill server has ended the ticket, and writes nothing more for it."""
        self.state = IncomingState.ENDED
        self.stop_writer()

    def lose(self) -> None:
        """The session has ended. A prefill server that writes by itself may go on until its access is revoked."""
        self.state = IncomingState.ENDED

    def stop_writer(self) -> None:
        """The prefill server cannot write into our pages any more."""
        if self.writer is not RemoteWriter.NONE:
            self.writer = RemoteWriter.STOPPED

    def _leave(self, state: IncomingState) -> None:
        if self.state is not state:
            raise ValueError(f"transfer {self.key} is {self.state.value}, not {state.value}")
