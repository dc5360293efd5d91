"""Client of the join endpoint: runs a Membership over a socket, in the main thread until the stage is admitted, then
in a thread of its own."""

import logging
import threading
from typing import NoReturn

import zmq

from headrace.core.config import StageConfig
from headrace.core.messages.membership import AnyJoinReply, JoinRequest
from headrace.core.runtime.clock import Clock, LoopClock
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.runtime.event_loop import Poll
from headrace.core.runtime.output import exit_now
from headrace.server.stage_group.membership import EXIT_FAILURE, Membership, MembershipEnd

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20
RECONNECT_MS = 1000  # longest pause of libzmq between attempts to connect


class MembershipOver(Exception):
    """The stage was not admitted, or its group has ended."""

    def __init__(self, end: MembershipEnd) -> None:
        super().__init__(end.message)
        self.end = end


class JoinClient:
    """A connection to the scheduler's order socket for JoinRequests only; orders have their own.

    Args:
        endpoint: tcp://HOST:PORT of the scheduler.
        request: the JoinRequest of this process.
        timeout_s: longest time until it is admitted, in seconds.
    """

    def __init__(self, endpoint: str, request: JoinRequest, timeout_s: float, clock: Clock) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.maxmsgsize = MAX_REPLY_BYTES
        self._socket.reconnect_ivl_max = RECONNECT_MS
        self._socket.connect(endpoint)
        self._poll = Poll(zmq.Poller)
        self._clock = LoopClock(clock)  # a stage that was stopped, or kept from running, reads before it judges
        self._membership = Membership(request, timeout_s, self._clock.now())
        self._in: Codec[AnyJoinReply] = Codec(AnyJoinReply)
        self._out: Codec[JoinRequest] = Codec(JoinRequest)

    def join(self) -> StageConfig:
        """Block until every rank has joined. Raises MembershipOver."""
        while (config := self._membership.config) is None:
            self._turn()
        return config

    def start_heartbeat(self) -> None:
        """Keep up the membership in a thread from now on; when it ends, the process exits.

        The main thread may be loading the model, or in a collective with stages that are gone, and has nothing to save.
        """
        threading.Thread(target=self._heartbeat, name="membership", daemon=True).start()

    def _heartbeat(self) -> NoReturn:
        try:
            while True:
                self._turn()
        except MembershipOver as error:
            log.error("%s", error)
            exit_now(error.end.status)
        except Exception:
            log.exception("the membership thread has failed")
            exit_now(EXIT_FAILURE)

    def _turn(self) -> None:
        membership = self._membership
        timeout_s = membership.next_deadline() - self._clock.now()
        self._clock.wait(timeout_s)
        self._poll.readable([self._socket], timeout_s)
        now = self._clock.now()
        while (reply := self._receive()) is not None:
            membership.receive(reply, now)
        if (request := membership.tick(now)) is not None:
            self._socket.send(self._out.encode(request))
        if line := membership.pop_log_line():
            log.info("%s", line)
        if membership.end is not None:
            raise MembershipOver(membership.end)

    def _receive(self) -> AnyJoinReply | None:
        try:
            return self._in.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        except DecodeError as error:
            log.warning("cannot decode the scheduler's reply; does it run another version? (%s)", error)
            return None
