"""Checks clients' constraints in a child process (engine/grammar/checker.py) before their requests are admitted.

The child is started with the first constraint. What is known is answered at once; the others wait for a turn, of which
no client has all, and first tokens have turns of their own: their constraints have been checked before.
"""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from headrace.core.runtime.process import module_command
from headrace.core.shares import Shares
from headrace.core.types import refusals
from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.checker import CheckerConfig, CheckReply, CheckRequest

ANSWER_S = 30.0  # the child bounds CPU time; this is for machines that are busy
LOAD_S = 120.0  # of a large vocabulary, on a machine that is busy
AT_A_TIME = 3
MAX_WAITING = 64
MAX_KNOWN = 1024  # replies that are kept
MAX_REPLY_BYTES = 1 << 16

_Key = tuple[str, int | None]


class GrammarChecker:
    """Says of constraints whether they can be compiled. Used in one event loop."""

    def __init__(self, config: CheckerConfig) -> None:
        self._config = config
        self._child = _Child(config)
        self._constraints = FairTurns("constraints", at_a_time=AT_A_TIME, most_waiting=MAX_WAITING)
        self._tokens = FairTurns("first tokens", at_a_time=AT_A_TIME, most_waiting=MAX_WAITING)
        self._known: OrderedDict[_Key, str] = OrderedDict()  # least recently used first
        self._asked: dict[_Key, asyncio.Task[str]] = {}

    async def problem(self, constraint: Constraint, first: int | None = None, *, client: str = "") -> str:
        """Why a constraint cannot be compiled, or does not allow this first token; "" if it can. client: who asks, by
        tenant or address. Raises HeadraceError: 429 if too many of this client wait, 503 if it cannot be found out
        now."""
        key = (constraint.key, first)
        if key not in self._known:
            request = CheckRequest(constraint, first)
            if key not in self._asked:
                self._asked[key] = asyncio.create_task(self._find_out(key, request, client))
                self._asked[key].add_done_callback(lambda done: self._answered(key, done))
            # A client that gives up does not take the answer from others who wait for it.
            return await asyncio.shield(self._asked[key])
        self._known.move_to_end(key)
        return self._known[key]

    def _answered(self, key: _Key, done: asyncio.Task[str]) -> None:
        del self._asked[key]
        if not done.cancelled():
            done.exception()  # which may have no reader

    async def close(self) -> None:
        """End the child."""
        for task in self._asked.values():
            task.cancel()
        await self._child.close()

    async def _find_out(self, key: _Key, request: CheckRequest, client: str) -> str:
        turns = self._constraints if request.first is None else self._tokens
        async with turns.turn(client):
            problem = await self._child.ask(request)
        self._known[key] = problem
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return problem


class _Child:
    """The child process, and what it has been asked."""

    def __init__(self, config: CheckerConfig) -> None:
        self._config = config
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[str]] = {}
        self._asked = 0

    async def ask(self, request: CheckRequest) -> str:
        """What the child says of a request. Raises HeadraceError (503) if it says nothing."""
        async with self._starting:
            process = await self._running()
        assert process.stdin is not None, "it was opened"
        self._asked += 1
        number, reply = self._asked, asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            async with asyncio.timeout(ANSWER_S):
                process.stdin.write(msgspec.json.encode(msgspec.structs.replace(request, number=number)) + b"\n")
                await process.stdin.drain()
                return str(await reply)
        except TimeoutError as error:
            await self._end(process)
            raise refusals.CHECK_LATE.raised() from error
        except ConnectionError as error:
            await self._end(process)
            raise refusals.CHECKER_ENDED.raised() from error
        finally:
            self._replies.pop(number, None)

    async def close(self) -> None:
        """End it. What it has been asked has no answer."""
        if self._process is not None:
            await self._end(self._process)

    async def _end(self, process: Process) -> None:
        if self._process is process:
            self._process = None
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _running(self) -> Process:
        """The child, started if it does not run. Raises HeadraceError (503) if it cannot be."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.close()
        command = module_command("headrace.engine.grammar.checker", str(os.getpid()))
        # A session of its own: Ctrl-C in a terminal is for the server.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_REPLY_BYTES, start_new_session=True
        )
        self._process = process
        assert process.stdin is not None, "it was opened"
        assert process.stdout is not None, "it was opened"
        ready = b""
        try:
            async with asyncio.timeout(LOAD_S):
                process.stdin.write(msgspec.json.encode(self._config) + b"\n")
                await process.stdin.drain()
                ready = await process.stdout.readline()
        except (TimeoutError, ConnectionError):
            pass
        finally:
            if not ready:  # also if the caller is gone
                await self.close()
        if not ready:
            raise refusals.NO_CHECKER.raised()
        if why := msgspec.json.decode(ready, type=CheckReply).error:
            await self.close()
            raise refusals.CANNOT_CHECK.raised(why=why)
        self._reading = asyncio.create_task(self._read(process.stdout))  # which ends with the process
        return process

    async def _read(self, replies: asyncio.StreamReader) -> None:
        """Hand out replies until the child ends."""
        while line := await replies.readline():
            reply = msgspec.json.decode(line, type=CheckReply)
            if (waiting := self._replies.get(reply.number)) is not None and not waiting.done():
                waiting.set_result(reply.error)
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the child has ended"))


class FairTurns:
    """So many turns at a time, one of which is left for other clients. Clients that wait come in turn, each with what
    it asked for first. Used in one event loop."""

    def __init__(self, what: str, *, at_a_time: int, most_waiting: int) -> None:
        """what: for messages. most_waiting: of all clients; one with less than an equal share of them may always."""
        self._what, self._at_a_time, self._most_waiting = what, at_a_time, most_waiting
        self._running = Shares()
        self._waiting = Shares()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = (
            OrderedDict()
        )  # by client; who is next comes first

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it. Raises HeadraceError (429) if too many wait."""
        waiting = self._waiting
        if not waiting.admits(client, 1, self._most_waiting):
            raise refusals.CLIENT_WAITS.raised(own=waiting.used(client), what=self._what, total=waiting.total)
        begun = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(begun)
        waiting.add(client, 1)
        self._begin()
        try:
            await begun
        except asyncio.CancelledError:
            if begun.cancelled() or not begun.done():
                self._leave(client, begun)
            else:
                self._end(client)
            raise
        try:
            yield
        finally:
            self._end(client)

    def _begin(self) -> None:
        """Give turns to those who may have one."""
        for client in list(self._queues):
            if self._running.total >= self._at_a_time:
                return
            if self._running.used(client) < max(1, self._at_a_time - 1):
                begun = self._queues[client][0]
                self._leave(client, begun)
                if client in self._queues:
                    self._queues.move_to_end(client)
                self._running.add(client, 1)
                begun.set_result(None)

    def _leave(self, client: str, begun: "asyncio.Future[None]") -> None:
        self._queues[client].remove(begun)
        self._waiting.add(client, -1)
        if not self._queues[client]:
            del self._queues[client]

    def _end(self, client: str) -> None:
        self._running.add(client, -1)
        self._begin()
