"""Endpoint where external stages join: the part of the scheduler's order socket that any process may send to.

JoinRequests come over connections that libzmq has named. Orders and events pass over connections whose routing id only
a member of the group can know (server/stage_group/registry.py). Everything else is dropped and counted.
"""

import logging
from collections.abc import Container

import zmq

from headrace.core.messages.membership import AnyJoinReply, JoinProgress, JoinRefused, JoinRequest
from headrace.core.messages.stage_events import StageFailed
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.runtime.rate_limit import LogThrottle, RateLimits, printable
from headrace.core.stats import Counters, Sample
from headrace.server.stage_group.registry import Reply, StageRegistry

log = logging.getLogger(__name__)

JoinEvent = StageFailed | JoinProgress

REPLIES_PER_S = 20.0  # to one connection; a stage that joins, or has joined, asks less often
REPLY_BURST = 100.0


class JoinEndpoint:
    """Sends and receives for a StageRegistry over the order socket, which it shares with the StageChannel.

    Args:
        socket: the ROUTER from order_socket().
        registry: decides who is admitted.
        start_timeout_s: longest time that an admitted group may take to load, in seconds.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", registry: StageRegistry, start_timeout_s: float) -> None:
        self._socket = socket
        self._registry = registry
        self._start_timeout_s = start_timeout_s
        self._admitted_at = 0.0
        self._members = registry.identities()
        self._reported_status = ""
        self._log_throttle = LogThrottle()
        self._reply_limits = RateLimits(REPLIES_PER_S, REPLY_BURST)
        self._counters = Counters()
        self._in: Codec[JoinRequest] = Codec(JoinRequest)
        self._out: Codec[AnyJoinReply] = Codec(AnyJoinReply)

    @property
    def session(self) -> str:
        """Secret of the admitted group; empty while there is none."""
        return self._registry.session

    def is_member(self, route: bytes) -> bool:
        """Whether a connection belongs to a stage of the admitted group."""
        return route in self._members

    def is_known(self, route: bytes) -> bool:
        """Whether a process that has joined holds this connection, for its joins or for its orders."""
        return route in self._members or self._registry.joined(route)

    def receive(self, route: bytes, frames: list[bytes], now: float) -> list[JoinEvent]:
        """Handle a message from a connection that is not a member's: a JoinRequest, or garbage."""
        try:
            if len(frames) != 1:
                raise DecodeError("one frame was expected")
            request = self._in.decode(frames[0])
        except DecodeError:
            self._counters.add("malformed_frames_total", labels=("stages",))
            return []
        if not self._reply_limits.allowed(route, now):
            self._counters.add("refusals_total", labels=("stages", "too_many_joins"))
            return []
        before = self._registry.session
        replies = self._registry.join(route, request)
        if self._registry.session != before:
            self._admitted_at = now
        reply = replies[0][1]
        if isinstance(reply, JoinRefused):
            self._counters.add("refusals_total", labels=("stages", reply.code))
            text = f"refused a stage at {printable(request.host[:300])}: {reply.message}"
            if self._log_throttle.due(text, now):
                log.warning("%s", text)
        self._send(replies)
        return self._progress()

    def tick(self, ready: Container[int], now: float) -> list[JoinEvent]:
        """Send every member its current reply, as a heartbeat, and report members that cannot be reached.

        ready: ranks that have loaded; the others fail once start_timeout_s has passed.
        """
        lost = self._send(self._registry.replies())
        failures = [event for route in lost for event in self._registry.connection_lost(route)]
        if self._registry.session and now - self._admitted_at > self._start_timeout_s and not failures:
            text = f"it took more than {self._start_timeout_s:g} s to load"
            loading = [stage for stage in self._members.values() if stage not in ready]
            failures = [StageFailed(stage=stage, message=text) for stage in loading[:1]]
        return [*failures, *self._progress()]

    def end_group(self, reason: str) -> list[JoinEvent]:
        """End the group: its stages are told to exit."""
        self._send(self._registry.end_group(reason))
        self._reported_status = ""  # the scheduler's reason for not being ready is now the failure; report again
        return self._progress()

    def statistics(self) -> tuple[Sample, ...]:
        """Counters of malformed and refused joins."""
        return self._counters.snapshot()

    def _send(self, replies: list[Reply]) -> list[bytes]:
        """Returns the connections that cannot be reached."""
        lost: list[bytes] = []
        for route, reply in replies:
            try:
                self._socket.send_multipart((route, self._out.encode(reply)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                lost.append(route)
        return lost

    def _progress(self) -> list[JoinEvent]:
        """A JoinProgress if the status has changed since the last one."""
        self._members = self._registry.identities()
        status = self._registry.status()
        if status == self._reported_status:
            return []
        self._reported_status = status
        return [JoinProgress(message=status)]
