"""Which stages have joined: all of the scheduler's side of core/messages/membership.py but its socket. Pure.

               every rank has joined                   one of them leaves, or is given up
    GATHERING ──────────────────────► ADMITTED (session) ──────────────────────────────► GATHERING
        │ Waiting                         │ Admitted                        │ Dismissed

Every start of the group has an epoch and a secret of its own. A process takes part in one start only: when the group
ends, all its stages end with it, and join again as new processes.
"""

import hmac
import ipaddress
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
    Admitted,
    AnswerMessage,
    Dismissed,
    JoinRequest,
    Refused,
    Waiting,
)
from headrace.core.messages.orders import stage_identity
from headrace.core.messages.stage_events import StageFailed
from headrace.core.types.addresses import is_loopback

Reply = tuple[bytes, AnswerMessage]


@dataclass(slots=True)
class RegisteredStage:
    """A process that has joined, and the connection on which it was heard last."""

    join: JoinRequest
    route: bytes


class StageRegistry:
    """Gathers one process per rank, and tells each of them its whole configuration.

    template: what all stages have in common. endpoint: where they join, for messages. control_host: where the control
    endpoint listens, if decode servers fetch from the stages. new_session makes unguessable secrets.
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
        self._members: dict[int, RegisteredStage] = {}
        self._ended = ""  # why the last group has
        self.epoch = 0
        self.session = ""

    def receive(self, route: bytes, join: JoinRequest) -> list[Reply]:
        """Handle a JoinRequest of the connection route. The first reply is its answer."""
        refusal = self._objection(join)
        if refusal is not None:
            return [(route, refusal)]
        member = self._members.get(join.rank)
        ours = member is not None and member.join.incarnation == join.incarnation
        if join.session and (join.session != self.session or not ours):
            if ours:  # it has been told of an earlier group after it joined this one
                del self._members[join.rank]
            return [(route, Dismissed(message=self._ended or "this scheduler has started after the group"))]
        if member is not None and not ours:
            text = f"another stage {join.rank}, at {member.join.host}, has joined; this one waits for it to leave"
            return [(route, Waiting(message=text))]
        self._members[join.rank] = RegisteredStage(join, route)
        if self.session:
            return [(route, self._answer(join))]
        if len(self._members) == self._template.stages:
            self.epoch += 1
            self.session = self._new_session()
        own = (route, self._answer(join))
        return [own, *(reply for reply in self.answers() if reply[0] != route)] if self.session else [own]

    def answers(self) -> list[Reply]:
        """What to say to every member now, unasked. Who cannot be reached is to be reported to lose()."""
        return [(member.route, self._answer(member.join)) for member in self._members.values()]

    def lose(self, route: bytes) -> list[StageFailed]:
        """A connection is gone. With it goes its process, and the group if that was a part of one."""
        rank = next((rank for rank, member in self._members.items() if member.route == route), None)
        if rank is None:
            return []
        if not self.session:
            del self._members[rank]
            return []
        return [StageFailed(stage=rank, message="its process has ended, or its machine cannot be reached")]

    def dismiss(self, reason: str) -> list[Reply]:
        """The group, if there is one, has ended: wait for the next one."""
        if not self.session:
            return []
        replies: list[Reply] = [(member.route, Dismissed(message=reason)) for member in self._members.values()]
        self._members.clear()
        self.session = ""
        self._ended = reason
        return replies

    def status(self) -> str:
        """How far the stages have come together."""
        if self.session:
            return f"all {self._template.stages} stages have joined and are loading"
        text = f"{self._missing()} to join at {self._endpoint}"
        return f"{self._ended}; {text}" if self._ended else text

    def identities(self) -> dict[bytes, int]:
        """The names under which the stages of the group send their events; empty while there is none."""
        ranks = self._members if self.session else ()
        return {stage_identity(rank, self.epoch, self.session): rank for rank in ranks}

    def _answer(self, join: JoinRequest) -> AnswerMessage:
        return Admitted(config=self._configuration(join)) if self.session else Waiting(message=self._missing())

    def _missing(self) -> str:
        missing = [str(rank) for rank in range(self._template.stages) if rank not in self._members]
        names = ", ".join(missing[:-1]) + " and " + missing[-1] if len(missing) > 1 else missing[0]
        return f"waiting for stage{'s' if len(missing) > 1 else ''} {names} of {self._template.stages}"

    def _configuration(self, join: JoinRequest) -> StageConfig:
        transfer = self._template.transfer
        first = transfer.data_port
        port = join.data_port or (first + join.rank if first else 0)
        return msgspec.structs.replace(
            self._template,
            stage=join.rank,
            epoch=self.epoch,
            session=self.session,
            transfer=msgspec.structs.replace(transfer, host=join.host, data_port=port),
        )

    def _objection(self, join: JoinRequest) -> Refused | None:
        """Why a process cannot become a stage here, however often it is started."""
        stages = self._template.stages
        if self._key and not hmac.compare_digest(join.key.encode(), self._key.encode()):
            text = "the stage's key is not the server's: set HEADRACE_STAGE_KEY to the same value for both"
            return Refused(code=WRONG_KEY, message=text)
        if join.version != self._version:
            text = f"the stage runs version {join.version} and the server {self._version}: use one for both"
            return Refused(code=WRONG_VERSION, message=text)
        if join.world_size != stages:
            text = f"the stage is one of {join.world_size} and the server was started with --pp {stages}"
            return Refused(code=WRONG_WORLD_SIZE, message=text)
        if not 0 <= join.rank < stages:
            return Refused(code=WRONG_RANK, message=f"rank {join.rank} does not exist: there are 0 to {stages - 1}")
        if self._control_host is not None and (why := unreachable(join.host, self._control_host)):
            return Refused(code=UNREACHABLE_HOST, message=f"{why}: write --transfer-host with the machine's address")
        return None


def unreachable(host: str, control_host: str) -> str:
    """Why decode servers that reach the control endpoint could not reach a stage's data socket; "" when they could."""
    if _is_wildcard(host):
        return f"decode servers cannot connect to {host}"
    if is_loopback(host) and not is_loopback(control_host):
        return f"decode servers on other machines cannot connect to {host}"
    return ""


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"
