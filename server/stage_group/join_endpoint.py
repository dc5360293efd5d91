"""Where stages that somebody else has started join: the outward half of the scheduler's order socket.

Joins come on connections that libzmq has named, orders and events pass on those that bear a name which only a member
of the group can know (server/stage_group/registry.py). Whatever else comes to the socket is dropped and counted.
"""

import logging
from collections.abc import Container

import zmq

from headrace.core.messages.membership import AnswerMessage, Gathering, JoinRequest, Refused
from headrace.core.messages.stage_events import StageFailed
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.runtime.log_throttle import LogThrottle, printable
from headrace.core.stats import Counters, Sample
from headrace.server.stage_group.registry import Reply, StageRegistry

log = logging.getLogger(__name__)

GateEvent = StageFailed | Gathering


class JoinEndpoint:
    """Carries a roster's words over the order socket, which it shares with the StageChannel. start_timeout_s: longest
    time that a group may take to load."""

    def __init__(self, socket: "zmq.Socket[bytes]", roster: StageRegistry, start_timeout_s: float) -> None:
        self._socket = socket
        self._roster = roster
        self._start_timeout_s = start_timeout_s
        self._admitted = 0.0  # when the group was
        self._members = roster.identities()
        self._told = ""
        self._quiet = LogThrottle()
        self._counters = Counters()
        self._in: Codec[JoinRequest] = Codec(JoinRequest)
        self._out: Codec[AnswerMessage] = Codec(AnswerMessage)

    @property
    def session(self) -> str:
        """Secret of the group that was admitted last; "" while there is none."""
        return self._roster.session

    def admitted(self, route: bytes) -> bool:
        """Whether a connection is that of a member of the group."""
        return route in self._members

    def receive(self, route: bytes, frames: list[bytes], now: float) -> list[GateEvent]:
        """Take in what a stranger sent: a JoinRequest, or nothing that matters."""
        try:
            if len(frames) != 1:
                raise DecodeError("one frame was expected")
            join = self._in.decode(frames[0])
        except DecodeError:
            self._counters.add("malformed_frames_total", labels=("stages",))
            return []
        before = self._roster.session
        replies = self._roster.receive(route, join)
        if self._roster.session != before:
            self._admitted = now
        answer = replies[0][1]
        if isinstance(answer, Refused):
            self._counters.add("refusals_total", labels=("stages", answer.code))
            about = f"refused a stage at {printable(join.host[:300])}: {answer.message}"
            if self._quiet.due(about, now):
                log.warning("%s", about)
        self._say(replies)
        return self._news()

    def tick(self, ready: Container[int], now: float) -> list[GateEvent]:
        """Say to every member where things stand, and find out by it whether it is still there. ready: the stages that
        have loaded."""
        lost = self._say(self._roster.answers())
        failures = [event for route in lost for event in self._roster.lose(route)]
        if self._roster.session and now - self._admitted > self._start_timeout_s and not failures:
            text = f"it took more than {self._start_timeout_s:g} s to load"
            loading = [stage for stage in self._members.values() if stage not in ready]
            failures = [StageFailed(stage=stage, message=text) for stage in loading[:1]]
        return [*failures, *self._news()]

    def dismiss(self, reason: str) -> list[GateEvent]:
        """The group has ended: its stages have to, too."""
        self._say(self._roster.dismiss(reason))
        self._told = ""  # the scheduler has just given another reason for not being ready
        return self._news()

    def statistics(self) -> tuple[Sample, ...]:
        return self._counters.snapshot()

    def _say(self, replies: list[Reply]) -> list[bytes]:
        """Send; returns the connections that are gone."""
        lost: list[bytes] = []
        for route, answer in replies:
            try:
                self._socket.send_multipart((route, self._out.encode(answer)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                lost.append(route)
        return lost

    def _news(self) -> list[GateEvent]:
        """What has become different since the last time."""
        self._members = self._roster.identities()
        status = self._roster.status()
        if status == self._told:
            return []
        self._told = status
        return [Gathering(message=status)]
