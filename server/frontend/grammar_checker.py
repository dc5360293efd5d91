"""Checks clients' constraints in a child process (engine/grammar/checker.py) before their requests are admitted.

The child is started with the first constraint. One that takes longer than COMPILE_S is ended, with the constraint that
it was at; the next one gets a new child.
"""

import asyncio
import logging
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress

import msgspec

from headrace.core.runtime.process import module_command
from headrace.core.types.constraint import Constraint
from headrace.core.types.errors import unavailable
from headrace.engine.grammar.checker import CheckerConfig, CheckReply, CheckRequest

log = logging.getLogger(__name__)

COMPILE_S = 5.0  # of one constraint
LOAD_S = 120.0  # of a large vocabulary, on a machine that is busy
MAX_KNOWN = 1024  # replies that are kept
MAX_REPLY_BYTES = 1 << 16


class GrammarChecker:
    """Says of constraints whether they can be compiled. Used in one event loop."""

    def __init__(self, config: CheckerConfig, *, compile_s: float = COMPILE_S) -> None:
        self._config = config
        self._compile_s = compile_s
        self._turn = asyncio.Lock()
        self._child: Process | None = None
        self._known: OrderedDict[tuple[str, int | None], str] = OrderedDict()  # least recently used first

    async def problem(self, constraint: Constraint, first: int | None = None) -> str:
        """Why a constraint cannot be compiled, or does not allow this first token; "" if it can. Raises HeadraceError
        (503) if that cannot be found out now."""
        key = (constraint.key, first)
        if key not in self._known:
            async with self._turn:
                if key not in self._known:
                    self._known[key] = await self._ask(CheckRequest(constraint, first))
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return self._known[key]

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()

    async def _ask(self, request: CheckRequest) -> str:
        done = False
        try:
            child = await self._running()
            reply = await self._exchange(child, msgspec.json.encode(request), self._compile_s)
            done = True
            return reply.error
        except TimeoutError:
            return f"it takes longer than {self._compile_s:g} s to compile, which is the limit"
        except _ChildEnded:
            return "it takes more memory to compile than a constraint may"
        finally:
            if not done:  # also if the client is gone: a late reply is not taken for the next one
                await self.close()

    async def _running(self) -> Process:
        """The child, started if it does not run. Raises HeadraceError (503) if it cannot be."""
        child = self._child
        if child is None or child.returncode is not None:
            command = module_command("headrace.engine.grammar.checker", str(os.getpid()))
            # A session of its own: Ctrl-C in a terminal is for the server.
            child = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_REPLY_BYTES, start_new_session=True
            )
            self._child = child
            try:
                ready = await self._exchange(child, msgspec.json.encode(self._config), LOAD_S)
            except (TimeoutError, _ChildEnded) as error:
                raise unavailable("the process that checks constraints does not start") from error
            if ready.error:
                raise unavailable(f"this server cannot check constraints: {ready.error}")
        return child

    async def _exchange(self, child: Process, line: bytes, within_s: float) -> CheckReply:
        assert child.stdin is not None, "it was opened"
        assert child.stdout is not None, "it was opened"
        try:
            async with asyncio.timeout(within_s):
                child.stdin.write(line + b"\n")
                await child.stdin.drain()
                reply = await child.stdout.readline()
        except ConnectionError as error:
            raise _ChildEnded from error
        if not reply:
            raise _ChildEnded
        return msgspec.json.decode(reply, type=CheckReply)


class _ChildEnded(Exception):
    """The child has ended without a reply."""
