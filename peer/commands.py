"""Commands to a peer thread and its results.

    RenewLease ─► LoadKv ─► Loaded ─► ReleaseLoad       the owner copies the KV between Loaded and ReleaseLoad
                     ├────► LoadFailed
                     └────► LoadCancelled               after CancelLoad

    AddPrefill ─► PrefillState, again whenever it changes ─► RemovePrefill       as to a scheduler

AddPrefill keeps a session with a prefill server open, with tickets or without. Loads of tickets at this address go
through the same session. The owner's word is enough: the address need not be among PeerLimits.rules. RemovePrefill lets
go of the session; loads that are under way go on.

They may cross a process boundary.
"""

import msgspec

from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.replies import PrefillState
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms
from headrace.core.types.requests.request import FirstToken


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefill server is."""

    host: str
    port: int
    """Port of the prefill server's control endpoint, or with `http` of its HTTP server."""
    http: bool = False
    """port is that of the HTTP server, which is asked for the control endpoint."""

    @classmethod
    def of_endpoint(cls, endpoint: str) -> "ServerAddress":
        """Of a control endpoint, tcp://HOST:PORT."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return ServerAddress(host=host.strip("[]"), port=int(port))


class TicketRef(ServerAddress, frozen=True, kw_only=True):
    """A ticket and the prefill server that has it."""

    name: str
    wait: bool = True
    """The prompt may still be on its way to the prefill server; otherwise an unknown ticket is an error."""
    fingerprint: str = ""
    """Fingerprint of the model that computed the KV; "" if unknown."""


class LookUpControlPort(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: ask a prefill server's HTTP port for its control port. Answered by ControlPortReply."""

    name: str
    """See server_name()."""
    host: str
    port: int


class ControlPortReply(msgspec.Struct, frozen=True, kw_only=True):
    """Event: answer to LookUpControlPort."""

    name: str
    control_port: int = 0
    """0 when the lookup failed."""
    reason: str = ""
    """Why it failed."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of commands."""

    id: str
    """The owner's name for one use of a ticket; never used again."""


class RenewLease(Command, frozen=True, kw_only=True):
    """Keep renewing the ticket's lease until it is loaded or cancelled. Not answered."""

    ticket: TicketRef


class LoadKv(Command, frozen=True, kw_only=True):
    """Fetch the KV of positions [start, tokens) of a prompt. Answered once, by Loaded, LoadFailed or LoadCancelled."""

    ticket: TicketRef
    start: int
    tokens: int
    """Length of the prompt."""
    prompt_hash: str = ""
    """Hash of the prompt (headrace.core.types.packed.prompt_hash), compared by the prefill server; "" skips that."""
    draft: DraftTerms = NO_DRAFT
    """Draft data to send along; Loaded.first.draft has what the prefill server had of it."""

    @property
    def count(self) -> int:
        """Positions to fetch."""
        return self.tokens - self.start


class RejectTicket(Command, frozen=True, kw_only=True):
    """The KV is wanted but must not be loaded. Answered by LoadFailed with this code and message; a lease held under
    this id is released."""

    code: str
    message: str


class CancelLoad(Command, frozen=True, kw_only=True):
    """Stop the load and release the ticket. Answered by LoadCancelled if a load was asked for and not answered yet."""


class ReleaseLoad(Command, frozen=True, kw_only=True):
    """The loaded KV has been copied; its space in the staging area is freed."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Base of results."""

    id: str
    """Id of the LoadKv or RejectTicket."""


class Loaded(LoadResult, frozen=True, kw_only=True):
    """The KV of positions [start, start + count) is in the staging area until ReleaseLoad."""

    at: int
    """Token of the staging area that holds position start."""
    start: int
    count: int
    first: FirstToken
    """Metadata row: first token, its logprobs, token counts; and the draft data that came with it."""
    seconds: float
    """From the command to this result."""


class LoadFailed(LoadResult, frozen=True, kw_only=True):
    """The load failed; its space in the staging area is used again once nothing can be written there any more."""

    code: str
    message: str


class LoadCancelled(LoadResult, frozen=True, kw_only=True):
    """Answer to CancelLoad; as in LoadFailed."""


AnyCommand = RenewLease | LoadKv | RejectTicket | CancelLoad | ReleaseLoad | AddPrefill | RemovePrefill
AnyResult = Loaded | LoadFailed | LoadCancelled | PrefillState
