"""Registry of external stages: the scheduler's side of core/messages/membership.py, without its socket. Pure.

               every rank has joined                     end_group(): a stage failed
    JOINING ────────────────────────► ADMITTED (session) ───────────────────────────► JOINING
        │ JoinPending                     │ JoinAccepted           │ GroupEnded

Every start of the group has its own epoch and secret. A process takes part in one start only: when the group ends,
all its stages exit, and join again as new processes.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.core.config import StageConfig
from headrace.core.messages.membership import (
    UNREACHABLE_HOST,
    WRONG_KEY,
    WRONG_RANK,
    WRONG_VERSION,
    WRONG_WORLD_SIZE,
    AnyJoinReply,
    GroupEnded,
    JoinAccepted,
    JoinPending,
    JoinRefused,
    JoinRequest,
)
from headrace.core.messages.orders import stage_identity
from headrace.core.messages.stage_events import StageFailed
from headrace.core.types.peers.addresses import is_loopback, is_wildcard
from headrace.core.types.ranks.layout import Layout

Reply = tuple[bytes, AnyJoinReply]  # ZMQ routing id, message


@dataclass(slots=True)
class RegisteredStage:
    """A process that has joined."""

    request: JoinRequest
    route: bytes
    """ZMQ routing id of its latest JoinRequest."""


class StageRegistry:
    """Admits one process per rank, and gives each its complete configuration.

    Args:
        template: what all stages have in common.
        key: that stages must show; empty: none.
        version: of this server.
        endpoint: where stages join, for messages.
        control_host: where the control endpoint listens, if decode servers fetch from the stages.
        new_session: makes unguessable secrets.
    """

    def __init__(
        self,
        template: StageConfig,
        *,
        key: str,
        version: str,
        endpoint: str,
        control_host: str | None,
        new_session: Callable[[], str],
    ) -> None:
        self._template = template
        self._key = key
        self._version = version
        self._endpoint = endpoint
        self._control_host = control_host
        self._new_session = new_session
        self._members: dict[int, RegisteredStage] = {}  # by rank
        self._end_reason = ""  # of the latest group
        self.epoch = 0
        """Counts the groups that were complete."""
        self.session = ""
        """Secret of the group; empty while ranks are missing."""

    def join(self, route: bytes, request: JoinRequest) -> list[Reply]:
        """Handle a JoinRequest. The first reply answers it, others go to the members it completes."""
        refusal = self._refusal(request)
        if refusal is not None:
            return [(route, refusal)]
        member = self._members.get(request.rank)
        same_process = member is not None and member.request.incarnation == request.incarnation
        if request.session and (request.session != self.session or not same_process):
            if same_process:  # the reply of an earlier group reached it after it had joined this one
                del self._members[request.rank]
            return [(route, GroupEnded(message=self._end_reason or "this scheduler has started after the group"))]
        if member is not None and not same_process:
            text = (
                f"another process at {member.request.host} has joined as rank {request.rank}; waiting until it leaves"
            )
            return [(route, JoinPending(message=text))]
        self._members[request.rank] = RegisteredStage(request, route)
        if self.session:
            return [(route, self._reply(request))]
        if len(self._members) == len(self._template.layout.ranks):
            self.epoch += 1
            self.session = self._new_session()
        own = (route, self._reply(request))
        return [own, *(reply for reply in self.replies() if reply[0] != route)] if self.session else [own]

    def replies(self) -> list[Reply]:
        """The current reply to every member. Report connections that cannot be reached to connection_lost()."""
        return [(member.route, self._reply(member.request)) for member in self._members.values()]

    def joined(self, route: bytes) -> bool:
        """Whether this is the connection of a process that has joined."""
        return any(member.route == route for member in self._members.values())

    def connection_lost(self, route: bytes) -> list[StageFailed]:
        """Remove the member of a lost connection. If it was part of an admitted group, the group has failed."""
        rank = next((rank for rank, member in self._members.items() if member.route == route), None)
        if rank is None:
            return []
        if not self.session:
            del self._members[rank]
            return []
        return [StageFailed(stage=rank, message="its process has ended, or its machine cannot be reached")]

    def end_group(self, reason: str) -> list[Reply]:
        """End the group, if one is admitted, and begin to wait for the next one."""
        if not self.session:
            return []
        replies: list[Reply] = [(member.route, GroupEnded(message=reason)) for member in self._members.values()]
        self._members.clear()
        self.session = ""
        self._end_reason = reason
        return replies

    def status(self) -> str:
        """Which ranks have joined, as text for /ready and logs."""
        if self.session:
            return f"all {self._count()} have joined and are loading"
        text = f"{self._missing()} to join at {self._endpoint}"
        return f"{self._end_reason}; {text}" if self._end_reason else text

    def identities(self) -> dict[bytes, int]:
        """ZMQ routing ids under which the stages of the group send events, with their ranks; empty without a group."""
        ranks = self._members if self.session else ()
        return {stage_identity(rank, self.epoch, self.session): rank for rank in ranks}

    def _reply(self, request: JoinRequest) -> AnyJoinReply:
        return JoinAccepted(config=self._config(request)) if self.session else JoinPending(message=self._missing())

    def _missing(self) -> str:
        missing = [str(rank) for rank in self._template.layout.ranks if rank not in self._members]
        names = ", ".join(missing[:-1]) + " and " + missing[-1] if len(missing) > 1 else missing[0]
        return f"waiting for {self._word()}{'s' if len(missing) > 1 else ''} {names} of {self._size()}"

    def _size(self) -> int:
        return len(self._template.layout.ranks)

    def _word(self) -> str:
        """What a process of the group is called in messages."""
        return "stage" if self._size() == self._template.layout.pp else "rank"

    def _count(self) -> str:
        return f"{self._size()} {self._word()}s"

    def _config(self, request: JoinRequest) -> StageConfig:
        transfer = self._template.transfer
        first = transfer.data_port
        port = request.data_port or (first + request.rank if first else 0)
        return msgspec.structs.replace(
            self._template,
            rank=request.rank,
            epoch=self.epoch,
            session=self.session,
            transfer=msgspec.structs.replace(transfer, host=request.host, data_port=port),
        )

    def _refusal(self, request: JoinRequest) -> JoinRefused | None:
        """Why a process can never become a stage of this server; None if it can."""
        size, degrees = self._size(), _degrees(self._template.layout)
        if self._key and not hmac.compare_digest(request.key.encode(), self._key.encode()):
            text = "the stage's key is not the server's: set HEADRACE_STAGE_KEY to the same value for both"
            return JoinRefused(code=WRONG_KEY, message=text)
        if request.version != self._version:
            text = f"the stage runs version {request.version} and the server {self._version}: use one for both"
            return JoinRefused(code=WRONG_VERSION, message=text)
        if request.world_size != size:
            text = f"the stage's world size is {request.world_size} and the server was started with {degrees}"
            return JoinRefused(code=WRONG_WORLD_SIZE, message=text)
        if not 0 <= request.rank < size:
            text = f"rank {request.rank} does not exist: there are 0 to {size - 1}"
            return JoinRefused(code=WRONG_RANK, message=text)
        if self._control_host is not None and (why := unreachable(request.host, self._control_host)):
            text = f"{why}: write --transfer-host with the machine's address"
            return JoinRefused(code=UNREACHABLE_HOST, message=text)
        return None


def _degrees(layout: Layout) -> str:
    """The flags that make the world size, and it where they are several."""
    if layout.dp == layout.tp == 1:
        return f"--pp {layout.pp}"
    given = [f"--{name} {degree}" for name, degree in (("pp", layout.pp), ("dp", layout.dp), ("tp", layout.tp))]
    return f"{', '.join(given)}: {len(layout.ranks)} ranks"


def unreachable(host: str, control_host: str) -> str:
    """Why decode servers that reach the control endpoint cannot reach a stage's data socket; empty when they can."""
    if is_wildcard(host):
        return f"decode servers cannot connect to {host}"
    if is_loopback(host) and not is_loopback(control_host):
        return f"decode servers on other machines cannot connect to {host}"
    return ""
