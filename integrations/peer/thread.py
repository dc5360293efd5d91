"""The peer's thread: its sockets, its clock, and the loads between them.

    owner ──commands──► ┌────────┐ ◄──── control endpoint (control client)
          ◄──results─── │ thread │ ◄──── stages (receiver) ──► staging area
                        └────────┘
A turn: wait, take commands, take what the sockets have, do what is due; after each, carry out what the loads ask for.
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import PeerEffect, PeerEvent
from headrace.core.runtime.clock import Clock, SystemClock
from headrace.core.runtime.event_loop import EventLoop
from headrace.core.types.allow_list import is_allowed
from headrace.integrations.peer.commands import AnyCommand, AnyResult, Discover, Found
from headrace.integrations.peer.loader import METADATA_ROWS, KvLoader
from headrace.integrations.peer.lookup import Lookups
from headrace.integrations.peer.records import Limits
from headrace.integrations.peer.staging import Staging
from headrace.transfer.control.client import ControlClient
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.matching import make_hello

log = logging.getLogger(__name__)


class PeerFailed(Exception):
    """The thread has ended, and every load with it."""


class Stopped(msgspec.Struct, frozen=True):
    """Last word of the thread. reason: "" when it was told to stop."""

    reason: str = ""


class PeerThread(threading.Thread):
    """One peer of any number of prefill servers. submit() may be called by any thread, results() by one.
    api_key: shown to the HTTP ports of prefill servers."""

    def __init__(
        self,
        limits: Limits,
        staging: Staging,
        *,
        name: str,
        max_model_len: int,
        transfer: TransferConfig | None = None,
        api_key: str = "",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(name="headrace-peer", daemon=True)
        config = transfer or TransferConfig()
        self._clock = clock or SystemClock()
        self._context: Any = zmq.Context()
        self._loads = KvLoader(limits)
        self._control_client = ControlClient(
            config, self._context, lambda host, port: is_allowed(limits.rules, host, port)
        )
        self._receiver = Receiver(
            config,
            stage=0,
            geometry=staging.geometry,
            store=staging,
            context=self._context,
            metadata_rows=METADATA_ROWS,
        )
        hello = make_hello(
            config,
            instance=secrets.token_hex(16),
            name=name,
            role="decode",
            fingerprint=limits.fingerprint,
            geometries=(staging.geometry,),
            kv_pages=staging.pages,
            max_model_len=max_model_len,
            metadata_rows=METADATA_ROWS,
        )
        self._control_client.ready(hello)
        self._loop = EventLoop((self._control_client, self._receiver), zmq.Poller, self._clock)
        self._commands: queue.SimpleQueue[AnyCommand | Found | None] = queue.SimpleQueue()  # bounded by the requests
        self._results: queue.SimpleQueue[AnyResult | Stopped] = queue.SimpleQueue()  # one for each command at most
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._lookups = Lookups(self.submit, api_key)
        self._running = True

    def submit(self, *commands: AnyCommand | Found | None) -> None:
        """Hand commands over; None ends the thread."""
        for command in commands:
            self._commands.put(command)
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake; closed: it has ended
            self._bell.send(b"\0")

    def results(self, wait_s: float = 0.0) -> list[AnyResult]:
        """What has been answered since the last call; waits for the first one up to wait_s. Raises PeerFailed."""
        found: list[AnyResult] = []
        try:
            while True:
                one = self._results.get(timeout=wait_s) if wait_s and not found else self._results.get_nowait()
                if isinstance(one, Stopped):
                    self._results.put(one)
                    if found:
                        return found
                    raise PeerFailed(one.reason or "the peer was stopped")
                found.append(one)
        except queue.Empty:
            return found

    def stop(self, timeout_s: float = 2.0) -> None:
        """Say goodbye to every prefill server, and end."""
        self.submit(None)
        self.join(timeout_s)

    def run(self) -> None:
        reason = ""
        try:
            while self._running:
                self._turn()
        except Exception as error:
            log.exception("the peer's thread has failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._lookups.close()
            self._control_client.close()
            self._receiver.close()
            self._bell.close()
            self._ear.close()
            self._results.put(Stopped(reason))
            self._context.term()

    def _turn(self) -> None:
        readable = self._loop.wait([self._ear.fileno()], [self._loads.next_deadline()])
        if self._ear.fileno() in readable:
            self._take_commands()
        for _, events in self._loop.events():
            self._note(events)
        self._loads.tick(self._clock.now())
        self._act()

    def _take_commands(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is None:
                    self._running = False
                elif isinstance(command, Found):
                    self._loads.handle(command, self._clock.now())
                else:
                    self._loads.apply(command, self._clock.now())
                    self._act()

    def _note(self, events: Sequence[Any]) -> None:
        for event in events:
            self._loads.handle(event, self._clock.now())
        self._act()

    def _act(self) -> None:
        """Carry out what the loads ask for, and what comes of that, until nothing is left; then answer."""
        while self._loads.out:
            effect = self._loads.out.popleft()
            now = self._clock.now()
            events: Sequence[PeerEvent | Any]
            if isinstance(effect, Discover):
                self._lookups.ask(effect)
                events = ()
            elif isinstance(effect, PeerEffect):
                events = self._control_client.apply(effect, now)
            else:
                events = self._receiver.apply(effect, now)
            for event in events:
                self._loads.handle(event, now)
        while self._loads.results:
            self._results.put(self._loads.results.popleft())
