"""Carries a Membership's words: in the main thread until the stage is admitted, then in one of its own."""

import logging
import os
import threading
from typing import NoReturn

import zmq

from headrace.core.config import StageConfig
from headrace.core.messages.membership import AnswerMessage, JoinRequest
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.runtime.polling import Poll
from headrace.server.stage_group.membership import End, Membership

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20


class NotAdmitted(Exception):
    """The stage did not get into a group; end says why, and how the process has to end."""

    def __init__(self, end: End) -> None:
        super().__init__(end.message)
        self.end = end


class JoinClient:
    """One connection to the scheduler's order socket, besides that of the orders."""

    def __init__(self, endpoint: str, join: JoinRequest, timeout_s: float, clock: Clock) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.maxmsgsize = MAX_ANSWER_BYTES
        self._socket.reconnect_ivl_max = 1000
        self._socket.connect(endpoint)
        self._poll = Poll(zmq.Poller)
        self._clock = clock
        self._membership = Membership(join, timeout_s, clock.now())
        self._in: Codec[AnswerMessage] = Codec(AnswerMessage)
        self._out: Codec[JoinRequest] = Codec(JoinRequest)

    def join(self) -> StageConfig:
        """Wait until the group is complete. Raises NotAdmitted."""
        while (config := self._membership.config) is None:
            self._turn()
        return config

    def keep(self) -> None:
        """Stay a member from now on, in a thread. When that ends the whole process does: the main thread may be
        anywhere, in a load or in a collective with stages that are gone, and has nothing to save."""
        threading.Thread(target=self._keep, name="membership", daemon=True).start()

    def _keep(self) -> NoReturn:
        try:
            while True:
                self._turn()
        except NotAdmitted as error:
            log.error("%s", error)
            os._exit(error.end.status)
        except Exception:
            log.exception("the membership thread has failed")
            os._exit(1)

    def _turn(self) -> None:
        membership = self._membership
        self._poll.readable([self._socket], membership.next_deadline() - self._clock.now())
        now = self._clock.now()
        while (answer := self._take()) is not None:
            membership.receive(answer, now)
        if (join := membership.tick(now)) is not None:
            self._socket.send(self._out.encode(join))
        if news := membership.news():
            log.info("%s", news)
        if membership.end is not None:
            raise NotAdmitted(membership.end)

    def _take(self) -> AnswerMessage | None:
        try:
            return self._in.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        except DecodeError as error:
            log.warning("the scheduler's answer cannot be read; is it of another version? (%s)", error)
            return None
