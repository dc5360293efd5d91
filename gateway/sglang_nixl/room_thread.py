"""Thread that hands KV over to SGLang decode engines: messages of decode ranks, writes, answers.

    decode ranks ──PULL──► ┌────────┐ ◄──expect, hold, withdraw── HTTP side
                 ◄─PUSH─── │ thread │ ──ended──►
                 ◄─NIXL─── └────────┘ ◄──results── peer thread ◄──commands──
One turn: wait │ commands │ messages │ writes │ deadlines; after each, apply the effects of the rooms.
"""

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import zmq

from headrace.core.runtime.clock import LoopClock, SystemClock
from headrace.core.runtime.event_loop import Wakeup
from headrace.core.runtime.rate_limit import LogThrottle, printable
from headrace.core.stats import Sample, Stats
from headrace.core.types import refusals
from headrace.core.types.errors import ConfigError, ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.addresses import bracketed, host_port, url
from headrace.core.types.peers.allow_list import canonical
from headrace.gateway.sglang_nixl.pool_runs import PoolRuns
from headrace.gateway.sglang_nixl.records import (
    Effect,
    HeldPrompt,
    RoomEnded,
    RoomLimits,
    StopWrites,
    Tell,
    WriteKv,
    WriteRow,
)
from headrace.gateway.sglang_nixl.room_writes import MakeWriter, RoomWrites
from headrace.gateway.sglang_nixl.rooms import RoomTable
from headrace.gateway.sglang_nixl.wire import MAX_FRAME, Abort, Address, Registration, RoomTarget, parse
from headrace.peer.commands import AnyCommand, LoadResult
from headrace.transfer.sockets.connections import Connections
from headrace.transfer.sockets.listener import NO_SESSION_S

log = logging.getLogger(__name__)

POLL_MS = 1  # between two looks at writes that are under way
IDLE_MS = 1000
TURN_MESSAGES = 256  # taken in one turn
MAX_SOCKETS = 256  # to decode ranks, the ones used last
QUEUED = 1024  # messages for one decode rank


class RoomThread(threading.Thread):
    """One rank of a prefill side, as SGLang decode engines see it. Public methods may be called by any thread."""

    def __init__(
        self,
        geometry: Geometry,
        pages: int,
        pool: memoryview,
        *,
        host: str,
        port: int = 0,
        limits: RoomLimits,
        make_writer: MakeWriter,
        submit: Callable[[AnyCommand], None],
        ended: Callable[[str, ErrorInfo | None], None],
        unregistered: Callable[[str], None] = lambda _address: None,
        is_allowed: Callable[[str], bool] = lambda _address: True,
        registered: Callable[[str, str], None] | None = None,
    ) -> None:
        """Bind the socket of decode ranks; start() runs the thread.

        pool: in the layout of PoolRuns. submit: takes commands to the peer thread, whose results are given to heard().
        ended: called once for each expect(), on this thread. unregistered: called with the IP address from which a
        decode rank sends that has not registered here. is_allowed: whether an IP address is one of the decode engines';
        messages that name another one are dropped. registered: called with the agent of a decode rank that has
        registered, and the address that it names; its rooms wait for verified(); None: they do not. Raises ConfigError
        when the address cannot be listened on.
        """
        super().__init__(name="headrace-sglang", daemon=True)
        self._clock = LoopClock(SystemClock())
        self._rooms = RoomTable(geometry, limits)
        self._writes = RoomWrites(pool, PoolRuns(geometry, pages), make_writer)
        self._submit, self._ended = submit, ended
        self._unregistered, self._is_allowed, self._registered = unregistered, is_allowed, registered
        self._zmq_context: Any = zmq.Context()
        self._connections = Connections(
            self._zmq_context, "sglang", has_session=lambda route: route in self._kept, max_age_s=NO_SESSION_S
        )
        self._ranks = limits.ranks
        self._speakers: dict[Address, bytes] = {}  # the last connection of each registered rank, by its number
        self._kept: frozenset[bytes] = frozenset()
        try:
            self._pull, self.port = _bind(self._zmq_context, host, port, self._connections)
        except ConfigError:
            self._connections.close()
            raise
        self._said = LogThrottle()
        self._pushes: OrderedDict[Address, Any] = OrderedDict()
        self._calls: queue.SimpleQueue[Callable[[float], None] | None] = queue.SimpleQueue()  # a few for each request
        self._wakeup = Wakeup()
        self._running = True

    def expect(self, request: str, room: int) -> None:
        """A request with this room has come. Answered once by `ended`, when the KV is at the decode engine or will not
        be."""
        self._call(lambda now: self._rooms.expect(request, room, now))

    def hold(self, request: str, room: int, held: HeldPrompt) -> None:
        """A prefill server holds the KV for a request."""
        self._call(lambda now: self._rooms.hold(request, room, held, now))

    def withdraw(self, request: str, room: int, error: ErrorInfo) -> None:
        """The prefill server has failed a request, or its client is gone."""
        self._call(lambda now: self._rooms.withdraw(request, room, error, now))

    def verified(self, agent: str, wrong: str) -> None:
        """The engine of a decode rank has said how it is set up. wrong: why it is not served; "" if it is."""
        self._call(lambda now: self._rooms.verify(agent, wrong, now))

    def heard(self, result: LoadResult) -> None:
        """A result of the peer thread."""
        self._call(lambda now: self._rooms.handle(result, now))

    def statistics(self) -> Stats:
        """Rooms that are open, and counters."""
        return Stats((Sample("paused_seconds_total", self._clock.paused_s), *self._rooms.statistics().samples))

    def connections(self) -> Stats:
        """Open connections of decode ranks, and those that were closed here."""
        return Stats(self._connections.statistics())

    def stop(self, timeout_s: float = 2.0) -> None:
        """End all writing and the thread; waits up to timeout_s for it."""
        self._call(None)
        self.join(timeout_s)

    def run(self) -> None:
        """Serve until stop()."""
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for socket in self._connections.sockets():
            poller.register(socket, zmq.POLLIN)
        try:
            while self._running:
                self._wait(poller)
                self._take_calls()
                self._take_messages()
                for load, lost in self._writes.ended():
                    self._rooms.written(load, lost, self._clock.now())
                self._rooms.tick(self._clock.now())
                self._apply_effects()
        except Exception:
            log.exception("the thread that serves SGLang decode engines has failed")
        finally:
            self._writes.close()
            for request in self._rooms.requests():
                self._ended(request, refusals.GATEWAY_STOPPED.error())
            for push in self._pushes.values():
                push.close()
            self._connections.close()
            self._pull.close()
            self._wakeup.close()
            self._zmq_context.term()

    def _call(self, call: Callable[[float], None] | None) -> None:
        self._calls.put(call)
        self._wakeup.set()

    def _wait(self, poller: Any) -> None:
        timeout = float(POLL_MS if self._writes else IDLE_MS)
        deadlines = [self._rooms.next_deadline(), self._connections.next_deadline()]
        deadline = min((at for at in deadlines if at is not None), default=None)
        if deadline is not None:
            timeout = min(timeout, max(0.0, (deadline - self._clock.now()) * 1000 + 1))
        self._clock.wait(timeout / 1000)
        poller.poll(int(timeout))

    def _take_calls(self) -> None:
        self._wakeup.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is None:
                    self._running = False
                else:
                    call(self._clock.now())
                    self._apply_effects()

    def _take_messages(self) -> None:
        self._connections.receive(self._clock.now())
        for _ in range(TURN_MESSAGES):
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._take(parse([frame.bytes for frame in frames]), frames[-1])
            except ValueError as error:
                self._warn("a message of a decode engine was dropped: %s", error)
            self._apply_effects()

    def _take(self, message: Registration | RoomTarget | Abort, frame: zmq.Frame) -> None:
        now = self._clock.now()
        if message.address is not None and not self._is_allowed(message.address.host):
            self._warn("a message that names %s, which is no decode engine's, was dropped", message.address.host)
            return
        match message:
            case Registration():
                self._register(message, now)
            case Abort():
                self._rooms.abort(message, now)
            case RoomTarget():
                if not self._rooms.is_registered(message.agent):
                    connection = self._connections.of(frame)  # None: it is closed already
                    self._unregistered(canonical(connection.host if connection is not None else message.address.host))
                self._rooms.target(message, now)
        if message.address is not None and self._rooms.is_rank(message.address):
            self._note_speaker(message.address, frame)

    def _note_speaker(self, address: Address, frame: zmq.Frame) -> None:
        """Keep the connection of a registered rank, one for each, among those that are closed when there are many."""
        connection = self._connections.of(frame)
        if connection is None or self._speakers.get(address) == b"%d" % connection.number:
            return
        self._speakers.pop(address, None)
        self._speakers[address] = route = b"%d" % connection.number
        if len(self._speakers) > self._ranks:
            del self._speakers[next(iter(self._speakers))]
        self._connections.note(route, frame)
        self._kept = frozenset(self._speakers.values())

    def _warn(self, message: str, what: object) -> None:
        if self._said.due(message, self._clock.now()):
            log.warning(message, printable(str(what)))

    def _register(self, message: Registration, now: float) -> None:
        known = self._rooms.is_registered(message.agent)
        wrong = self._rooms.register(message, now, verified=self._registered is None)
        text = "SGLang decode engine at %s, rank %d of %d: %s"
        rank = message.address.host, message.tp_rank, message.tp_size
        if (fitted := self._rooms.rank(message.agent)) is not None:
            self._writes.prepare(fitted)
            if self._registered is not None and not known:
                self._registered(message.agent, message.address.host)
        log.log(logging.WARNING if wrong else logging.INFO, text, *rank, wrong or "registered")

    def _apply_effects(self) -> None:
        while self._rooms.effects:
            self._apply(self._rooms.effects.popleft())

    def _apply(self, effect: Effect) -> None:
        match effect:
            case WriteKv():
                self._writes.write_kv(effect)
            case WriteRow():
                self._writes.write_row(effect)
            case StopWrites(agents):
                self._writes.stop(agents)
            case Tell(address, frames):
                self._tell(address, frames)
            case RoomEnded(request, error):
                self._ended(request, error)
            case _:
                self._submit(effect)

    def _tell(self, address: Address, frames: tuple[bytes, ...]) -> None:
        """Queue a message to a decode rank. One that is gone, or cannot be reached, gets none."""
        push = self._pushes.pop(address, None)
        try:
            if push is None:
                push = _connect(self._zmq_context, address)
            push.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:  # no descriptor is left, or the address is none of a network here
            self._warn("a decode engine is not told: %s", f"{host_port(address.host, address.port)}: {error.strerror}")
            if push is not None:
                push.close()
            return
        self._pushes[address] = push
        if len(self._pushes) > MAX_SOCKETS:
            self._pushes.popitem(last=False)[1].close()


def _connect(context: Any, address: Address) -> Any:
    """Raises ZMQError."""
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.IPV6, 1)
    push.setsockopt(zmq.LINGER, 0)
    push.setsockopt(zmq.SNDHWM, QUEUED)
    try:
        push.connect(url("tcp", address.host, address.port))
    except zmq.ZMQError:
        push.close()
        raise
    return push


def _bind(context: Any, host: str, port: int, connections: Connections) -> tuple[Any, int]:
    pull = context.socket(zmq.PULL)
    connections.watch(pull)
    pull.setsockopt(zmq.IPV6, 1)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    try:
        if port == 0:
            return pull, pull.bind_to_random_port(f"tcp://{bracketed(host)}")
        pull.bind(url("tcp", host, port))
    except zmq.ZMQError as error:
        pull.close()
        raise ConfigError(
            f"cannot listen on {url('tcp', host, port)}: {error.strerror}; write another address"
        ) from error
    return pull, port
