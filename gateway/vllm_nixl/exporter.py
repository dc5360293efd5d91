"""KV exporter: offers loaded KV to vLLM decode engines by NIXL, until they have read it or can read it no more.

    owner ──offer()──► lease ──► kv_transfer_params ──► router ──► decode engine
          ◄─release()── leases ◄── notices ── NIXL agent ◄── READ ──┤
                                             side channel ◄─ query ─┘
One thread answers queries, polls notices and ends leases. When pages are in quarantine (leases.py), a new generation
(agent_generation.py) takes over; the old one is ended as soon as its open leases are, and its pages are free again.
"""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
import zmq

from headrace.core.config import TransferConfig
from headrace.core.runtime.clock import Clock, LoopClock, SystemClock
from headrace.core.runtime.event_loop import Poll, Wakeup
from headrace.core.runtime.rate_limit import Backoff
from headrace.core.stats import Sample, Stats
from headrace.core.types.kv.geometry import ceil_div
from headrace.gateway.vllm_nixl.agent_generation import AgentGeneration
from headrace.gateway.vllm_nixl.asked_hash import AskedHash
from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine
from headrace.gateway.vllm_nixl.kv_pool import VllmPool
from headrace.gateway.vllm_nixl.leases import LeaseTable
from headrace.gateway.vllm_nixl.wire import QUERY_BYTES, handoff_params, is_query, parse_notice
from headrace.transfer.sockets.listener import Listener

log = logging.getLogger(__name__)

MAX_GENERATIONS = 4  # at a time: the current one, and those whose leases have not ended
BUSY_POLL_S = 0.002  # between two looks for notices while a lease is open
IDLE_POLL_S = 0.25
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 10.0  # between attempts to make a generation
# Between two generations: decode engines do another handshake for each, and each keeps a range of addresses for good.
GENERATION_S = 2.0
# A decode engine that has just got an agent's metadata connects to it with its first read: for this long the agent is
# kept, so that the engine is not cut off in the middle of that.
CONNECT_S = 2.0
QUEUED_REPLIES = 64  # per connection


class ExporterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and times."""

    host: str = "127.0.0.1"
    """Host of the side channel, which decode engines are told and which is bound."""
    port: int = 0
    """Port of the side channel; 0: a free one."""
    lease_s: float = 30.0
    """A lease ends after so long without a sign of its engine."""
    limit_s: float = 600.0
    """A lease ends after so long in any case."""
    devices: str = ""
    """Network device of NIXL; "": all."""


class SideChannel:
    """Side channel of NixlConnector's prefill side, where decode engines ask for the metadata of its NIXL agent: a
    bound ROUTER.

    Attributes:
        port: TCP port that it is bound to.
        handshakes: queries answered.
    """

    def __init__(self, context: Any, host: str, port: int) -> None:
        """port: 0 takes a free one. Raises ConfigError when it cannot be bound."""
        self._listener = Listener(
            TransferConfig(host=host),
            context,
            "side_channel",
            port=port,
            max_frame=QUERY_BYTES,
            queue=QUEUED_REPLIES,
            unread=QUEUED_REPLIES,
        )
        self.port = self._listener.port
        self.handshakes = 0

    def sockets(self) -> Sequence[Any]:
        """Sockets to poll for reading."""
        return self._listener.sockets()

    def answer(self, payload: Callable[[str], bytes], now: float) -> int:
        """Answer what has come; returns the number of handshakes. payload: for a query from an address, see
        wire.encode_payload()."""
        before = self.handshakes
        for arrival in self._listener.receive(now):
            delimiter, query = arrival.body if len(arrival.body) == 2 else (b"", b"")
            if not delimiter and is_query(query):
                clock = msgspec.msgpack.encode(time.perf_counter())
                _, address = self._listener.sender(arrival)
                self._listener.put_tracked((arrival.route, b"", payload(address), clock), ())
                self.handshakes += 1
            else:
                self._listener.refuse(arrival, b"", now)
        return self.handshakes - before

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()


LeaseCommand = Callable[[LeaseTable, float], None]  # the float: seconds, now


class KvExporter(threading.Thread):
    """Offers the pages of a pool to decode engines that were probed and are equal. Methods may be called by any
    thread."""

    def __init__(
        self,
        engine: DecodeEngine,
        pool: VllmPool,
        options: ExporterOptions,
        release: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        """Open the side channel and make a NIXL agent; start() runs the thread.

        release: called on the thread with a load's name, once for each offer, when its pages can be read no more.
        Raises ConfigError for a port that cannot be bound, OSError when NIXL cannot be used.
        """
        super().__init__(name="headrace-exporter", daemon=True)
        self._engine, self._pool, self._options, self._release = engine, pool, options, release
        self._hash = AskedHash(engine.compatibility_hash)
        self._clock = LoopClock(clock or SystemClock())  # leases do not end while this process is stopped
        self._zmq_context: Any = zmq.Context()
        self._side_channel = SideChannel(self._zmq_context, options.host, options.port)
        self._leases = LeaseTable(options.lease_s, options.limit_s)
        self._generations = [self._make_generation(0)]  # the last is the current one
        self._commands: queue.SimpleQueue[LeaseCommand] = queue.SimpleQueue()  # one per offer
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        self._next_attempt = 0.0
        self._wakeup = Wakeup()
        self._poll = Poll(zmq.Poller)
        self._running = True

    def offer(self, load: str, first_page: int, tokens: int, jobs: int = 1) -> dict[str, Any]:
        """Open a lease on loaded KV: returns kv_transfer_params for the decode engine, and release() follows. It waits
        until the rest of the last page is clear.

        load: the caller's name of the pages. first_page: of the run of pages that holds the prompt's KV. tokens: of
        the prompt. jobs: times that the engine will read it: equal prompts in the body × n. Raises ValueError for pages
        that are not in the pool.
        """
        pages = ceil_div(tokens, self._pool.geometry.page_size)
        if tokens < 1 or first_page < 0 or first_page + pages > self._pool.pages:
            raise ValueError(f"pages {first_page} to {first_page + pages} of {self._pool.pages} for {tokens} tokens")
        self._pool.zero_tail(first_page, tokens)
        request = f"headrace-{secrets.token_hex(16)}"
        current = self._generations[-1]

        def grant(leases: LeaseTable, now: float) -> None:
            leases.grant(request, load, tokens=tokens, jobs=jobs, generation=current.number, now=now)

        self._do(grant)
        return handoff_params(
            engine_id=current.engine_id,
            request=request,
            host=self._options.host,
            port=self._side_channel.port,
            blocks=range(first_page, first_page + pages),
            tokens=tokens,
        )

    def withdraw(self, load: str) -> None:
        """End the lease of an offer whose params were not taken, as far as is known; release() follows."""
        self._do(lambda leases, now: leases.withdraw(load))

    def serve(self, engines: Iterable[DecodeEngine]) -> None:
        """The engines that are there: alike, but for their releases of vLLM."""
        known = [(engine.addresses, engine.compatibility_hash, engine.agent) for engine in engines]
        self._do(lambda leases, now: self._hash.serve(known))

    def engine_gone(self, agent: str, others: Collection[str]) -> None:
        """A decode engine's process has ended. agent: its NIXL agent. others: those of the engines that are there."""
        self._do(lambda leases, now: leases.engine_gone(agent, others))

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        samples = (
            Sample("handshakes_total", self._side_channel.handshakes),
            Sample("nixl_agents", len(self._generations)),
            Sample("paused_seconds_total", self._clock.paused_s),
        )
        return Stats(samples=(*samples, *self._leases.statistics().samples))

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, and every reader's access."""
        self._running = False
        self._wakeup.set()
        if self.ident is None:
            self._close()
        else:
            self.join(timeout_s)

    def run(self) -> None:
        """Answer queries and notices until stop()."""
        try:
            while self._running:
                self._turn()
        except Exception:
            log.exception("the exporter's thread has failed")
        finally:
            self._close()

    def _close(self) -> None:
        for generation in self._generations:
            generation.end()
        self._side_channel.close()
        self._zmq_context.term()
        self._wakeup.close()

    def _turn(self) -> None:
        self._wait()
        self._take_commands()  # before generations end: some of these offers may be of one
        over: list[str] = []
        self._answer_queries(self._generations[-1])
        for generation in self._generations:
            over += self._take_notices(generation)
        self._leases.tick(self._clock.now())
        over += self._end_drained()
        for load in over:
            self._release(load)
        self._replace_current(self._clock.now())

    def _wait(self) -> None:
        longest_s = BUSY_POLL_S if len(self._leases) else IDLE_POLL_S
        self._clock.wait(longest_s)
        self._poll.readable((self._wakeup.fileno(), *self._side_channel.sockets()), longest_s)
        self._wakeup.clear()

    def _take_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()(self._leases, self._clock.now())

    def _answer_queries(self, current: AgentGeneration) -> None:
        if self._side_channel.answer(lambda address: current.payload(self._hash.of(address)), now := self._clock.now()):
            current.asked = now

    def _take_notices(self, generation: AgentGeneration) -> list[str]:
        over: list[str] = []
        for agent, text in generation.notices():
            if (notice := parse_notice(text)) is not None:
                self._hash.heard(agent)
                over += self._leases.notice(notice, agent, self._clock.now())
        return over

    def _end_drained(self) -> list[str]:
        """End replaced generations that have no open lease and to which no engine is connecting. Returns loads whose
        pages are free."""
        over: list[str] = []
        for generation in self._generations[:-1]:
            connected = self._clock.now() - generation.asked >= CONNECT_S
            if connected and self._leases.is_drained(generation.number):
                generation.end()
                self._generations.remove(generation)
                over += self._leases.generation_ended(generation.number)
        return over

    def _replace_current(self, now: float) -> None:
        """Make a new generation if the current one has offered pages that are in quarantine."""
        current = self._generations[-1]
        if not self._leases.has_quarantined(current.number) or now < self._next_attempt:
            return
        if len(self._generations) >= MAX_GENERATIONS:
            return
        try:
            made = self._make_generation(current.number + 1)
        except OSError as error:
            log.warning("pages stay in quarantine, since no new NIXL agent can be made: %s", error)
            self._next_attempt = self._backoff.next(now)
            return
        self._backoff.reset()
        self._next_attempt = now + GENERATION_S
        self._generations.append(made)
        self._hash.begin_turns()
        log.info("engine id %s takes over from %s, whose offers may be read late", made.engine_id, current.engine_id)

    def _make_generation(self, number: int) -> AgentGeneration:
        return AgentGeneration(number, self._engine, self._pool, self._options.devices)

    def _do(self, command: LeaseCommand) -> None:
        self._commands.put(command)
        self._wakeup.set()
