"""Peer thread: runs the loader with the sockets of a decode peer.

    owner ──commands──► ┌────────┐ ◄──── control endpoint (control client)
          ◄──results─── │ thread │ ◄──── stages (receiver) ──► staging area
                        └────────┘
One turn: wait │ commands │ sockets │ deadlines; after each, apply the loader's effects.
"""

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import PeerEffect, PeerEvent
from headrace.core.runtime.clock import Clock, LoopClock, SystemClock
from headrace.core.runtime.event_loop import EventLoop, Wakeup
from headrace.core.types.kv.backends import ZMQ
from headrace.core.types.peers.allow_list import is_allowed
from headrace.peer.commands import AnyCommand, AnyResult, ControlPortReply, LookUpControlPort
from headrace.peer.loader import METADATA_ROWS, KvLoader
from headrace.peer.lookup import ControlPortLookup
from headrace.peer.records import PeerLimits
from headrace.peer.staging import StagingMemory
from headrace.transfer.control.client import ControlClient
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.matching import make_hello

log = logging.getLogger(__name__)


class PeerFailed(Exception):
    """The peer thread has ended; every open load has failed."""


class ThreadEnded(msgspec.Struct, frozen=True):
    """Last entry of the result queue."""

    reason: str = ""
    """Why the thread ended; "" after stop()."""


class PeerThread(threading.Thread):
    """A decode peer of any number of prefill servers. submit() may be called by any thread, results() by one."""

    def __init__(
        self,
        limits: PeerLimits,
        staging: StagingMemory,
        *,
        name: str,
        max_model_len: int,
        transfer: TransferConfig | None = None,
        api_key: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Open the sockets; start() runs the thread.

        staging: where KV arrives, as limits describes it. name: for logs of prefill servers. max_model_len: longest
        sequence, told to prefill servers. api_key: sent in lookups to HTTP ports that limits.rules name by host and
        port. Raises ConfigError for CURVE key files that are missing.
        """
        assert (limits.pages, limits.page_tokens) == (staging.pages, staging.geometry.page_size), "one staging area"
        super().__init__(name="headrace-peer", daemon=True)
        config = transfer or TransferConfig()
        self._clock = LoopClock(clock or SystemClock())  # the process may keep this thread from running for long
        self._zmq_context: Any = zmq.Context()
        self._loader = KvLoader(limits)
        self._control_client = ControlClient(
            config, self._zmq_context, lambda host, port: is_allowed(limits.rules, host, port)
        )
        self._receiver = Receiver(
            config,
            stage=0,
            geometry=staging.geometry,
            store=staging,
            context=self._zmq_context,
            metadata_rows=METADATA_ROWS,
            registered_pools=staging.registered_pools,
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
            backends=tuple(name for name in config.backends if name == ZMQ or name in staging.registered_pools),
            memory=(staging.memory,) if staging.memory is not None else (),
            model=limits.model,
        )
        self._control_client.ready(hello)
        self._loop = EventLoop((self._control_client, self._receiver), zmq.Poller, self._clock, self._clock.wait)
        self._commands: queue.SimpleQueue[AnyCommand | ControlPortReply | None] = queue.SimpleQueue()  # one per request
        self._results: queue.SimpleQueue[AnyResult | ThreadEnded] = queue.SimpleQueue()  # one per load; server states
        self._wakeup = Wakeup()
        self._lookups = ControlPortLookup(self.submit, api_key, limits.rules)
        self._running = True

    def submit(self, *commands: AnyCommand | ControlPortReply | None) -> None:
        """Queue commands and wake the thread; None ends it."""
        for command in commands:
            self._commands.put(command)
        self._wakeup.set()

    def results(self, wait_s: float = 0.0) -> list[AnyResult]:
        """Results since the last call, waiting up to wait_s for the first one.

        Raises PeerFailed once the thread has ended and all results were returned.
        """
        found: list[AnyResult] = []
        try:
            while True:
                one = self._results.get(timeout=wait_s) if wait_s and not found else self._results.get_nowait()
                if isinstance(one, ThreadEnded):
                    self._results.put(one)
                    if found:
                        return found
                    raise PeerFailed(one.reason or "the peer was stopped")
                found.append(one)
        except queue.Empty:
            return found

    @property
    def stopping_pages(self) -> int:
        """Pages of loads that have ended and that a prefill server may still write into, which no other load may have.
        May be read by any thread."""
        return self._loader.stopping_pages

    def stop(self, timeout_s: float = 2.0) -> None:
        """End every session and the thread; waits up to timeout_s for it."""
        self.submit(None)
        self.join(timeout_s)

    def run(self) -> None:
        """Serve commands and sockets until stop()."""
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
            self._wakeup.close()
            self._results.put(ThreadEnded(reason))
            self._zmq_context.term()

    def _turn(self) -> None:
        readable = self._loop.wait([self._wakeup.fileno()], [self._loader.next_deadline()])
        if self._wakeup.fileno() in readable:
            self._take_commands()
        for _, events in self._loop.events():
            self._handle_events(events)
        self._loader.tick(self._clock.now())
        self._apply_effects()

    def _take_commands(self) -> None:
        self._wakeup.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is None:
                    self._running = False
                elif isinstance(command, ControlPortReply):
                    self._loader.handle(command, self._clock.now())
                else:
                    self._loader.apply(command, self._clock.now())
                    self._apply_effects()

    def _handle_events(self, events: Sequence[Any]) -> None:
        for event in events:
            self._loader.handle(event, self._clock.now())
        self._apply_effects()

    def _apply_effects(self) -> None:
        """Apply the loader's effects and those that follow from them, then queue its results."""
        while self._loader.effects:
            effect = self._loader.effects.popleft()
            now = self._clock.now()
            events: Sequence[PeerEvent | Any]
            if isinstance(effect, LookUpControlPort):
                self._lookups.ask(effect)
                events = ()
            elif isinstance(effect, PeerEffect):
                events = self._control_client.apply(effect, now)
            else:
                events = self._receiver.apply(effect, now)
            for event in events:
                self._loader.handle(event, now)
        while self._loader.results:
            self._results.put(self._loader.results.popleft())
