"""What the owner of a peer asks of it, and what it learns. Values that may cross a process boundary."""

import msgspec

from headrace.core.types.request import FirstToken


class TicketRef(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket and where it is. host, port: of the prefill server's control endpoint, or with http of its HTTP port,
    where the control endpoint is asked for. wait: its prompt may still be on the way.
    fingerprint: of the model that the KV is said to be of; "" says nothing."""

    name: str
    host: str
    port: int
    http: bool = False
    wait: bool = True
    fingerprint: str = ""


class Discover(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: ask an HTTP port where the control endpoint is; answered by Found. name: the server's, see name_of()."""

    name: str
    host: str
    port: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Event: what an HTTP port has answered. control_port 0: nothing of use, for this reason."""

    name: str
    control_port: int = 0
    reason: str = ""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of commands. id: the owner's name for the use of a ticket; used once."""

    id: str


class RenewLease(Command, frozen=True, kw_only=True):
    """The ticket will be loaded later: renew its lease until then. Answered by nothing."""

    ticket: TicketRef


class LoadKv(Command, frozen=True, kw_only=True):
    """Fetch the KV of positions [start, tokens) of a prompt of this many tokens. prompt_hash: of that prompt
    (headrace.core.types.packed.prompt_hash), "" has nothing compared. Answered by Loaded, LoadFailed or
    LoadCancelled, once."""

    ticket: TicketRef
    start: int
    tokens: int
    prompt_hash: str = ""

    @property
    def count(self) -> int:
        return self.tokens - self.start


class RejectTicket(Command, frozen=True, kw_only=True):
    """The KV is wanted but must not be loaded, for this reason: answered by LoadFailed with it. A ticket that was kept
    under this id is released."""

    code: str
    message: str


class CancelLoad(Command, frozen=True, kw_only=True):
    """LoadKv no more, and let the ticket go. Answered by LoadCancelled if a load has not been answered yet."""


class ReleaseLoad(Command, frozen=True, kw_only=True):
    """What was Loaded has been copied out: its place may be used again."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Base of answers."""

    id: str


class Loaded(LoadResult, frozen=True, kw_only=True):
    """The KV of [start, start + count) lies in the staging area from token `at` on, until ReleaseLoad. seconds: from
    the command to here."""

    at: int
    start: int
    count: int
    first: FirstToken
    seconds: float


class LoadFailed(LoadResult, frozen=True, kw_only=True):
    """Nothing is there, and nothing comes."""

    code: str
    message: str


class LoadCancelled(LoadResult, frozen=True, kw_only=True):
    """Answer to CancelLoad. Nothing is written for this load any more."""


AnyCommand = RenewLease | LoadKv | RejectTicket | CancelLoad | ReleaseLoad
AnyResult = Loaded | LoadFailed | LoadCancelled
