"""The process that compiles clients' constraints before they are admitted: `python -m headrace.engine.grammar.checker
PARENT_PID`, CheckerConfig as a line of JSON on standard input, then a line for each CheckRequest, answered by a line
with a CheckReply, in any order. The first reply says that the vocabulary is loaded.

A process of its own, since loading the vocabulary holds the GIL. It compiles nothing itself: each constraint has a copy
of the process (fork) that the kernel ends after a set CPU time or with too much memory, so that a hostile constraint
costs this and no more, and the vocabulary is loaded once.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import numpy as np

from headrace.core.runtime.process import die_with_parent, leave_signals_to_parent
from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.compiler import Grammar, GrammarCompiler, GrammarError

STEPS = 24  # tokens of a text
TEXTS = 16  # of a grammar, which may have dead ends; other constraints are compiled to what has none
TRIAL_S = 0.3  # of CPU time, after which no further text is begun
STEP_S = 0.25  # of CPU time for the mask of one token; usual are less than 0.02 s for the first one, 0.001 s afterwards
MAX_PATTERNS = 256  # of a schema
MEMORY_BYTES = 4 << 30  # of address space
COMPILE_S = 0.5  # of CPU time: a stage compiles it again, and others wait meanwhile
CHECK_S = 1.5  # of CPU time, with the trial
NICE = 5  # below the processes that serve
READ_BYTES = 1 << 16


def try_out(grammar: Grammar, texts: int = 1) -> None:
    """Generate random texts of a few tokens. Raises GrammarError where one cannot go on, or takes too long."""
    begun = time.thread_time()
    for seed in range(texts):
        _try_text(grammar.copy(), Random(seed))
        if time.thread_time() - begun > TRIAL_S:
            return


def _try_text(grammar: Grammar, random: Random) -> None:
    for _ in range(STEPS):
        before = time.thread_time()
        allowed = np.flatnonzero(grammar.mask())
        if not len(allowed):
            raise GrammarError("it allows no text")
        token = int(allowed[random.randrange(len(allowed))])
        if grammar.ended:
            return
        grammar.accept((token,))
        if (took := time.thread_time() - before) > STEP_S:
            raise GrammarError(f"it is too large: one token takes {took:.2f} s, and {STEP_S:g} s are the limit")


def try_patterns(compiler: GrammarCompiler, constraint: Constraint) -> None:
    """Try each regular expression of a JSON schema by itself, since a random text may not come to them. Raises
    GrammarError."""
    if constraint.kind != "json":
        return
    found = sorted(set(_patterns(json.loads(constraint.text))))
    if len(found) > MAX_PATTERNS:
        raise GrammarError(f"it has {len(found)} patterns, and {MAX_PATTERNS} are the limit")
    for pattern in found:
        try:
            grammar = compiler.compile(Constraint("regex", pattern.removeprefix("^").removesuffix("$")))
        except GrammarError:
            continue  # a form that the schema's dialect has, and which has been compiled with it
        try_out(grammar)


def _patterns(schema: Any) -> Iterator[str]:
    """The texts that may be patterns, in all objects."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            if isinstance(pattern := part.get("pattern"), str):
                yield pattern
            if isinstance(patterns := part.get("patternProperties"), dict):
                yield from patterns


class CheckerConfig(msgspec.Struct, frozen=True):
    """What the process is told when it starts; see GrammarCompiler."""

    model: str
    cache_dir: str
    words: int
    check_s: float = CHECK_S


class CheckRequest(msgspec.Struct, frozen=True):
    """A constraint to compile."""

    constraint: Constraint
    first: int | None = None
    """A first token that it has to allow; None: whether it can be compiled."""
    number: int = 0
    """Of the reply."""


class CheckReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a CheckRequest."""

    error: str = ""
    """Why it cannot be compiled or does not allow the token; "": it does."""
    number: int = 0


def check(compiler: GrammarCompiler, request: CheckRequest) -> CheckReply:
    """Compile a constraint and try it out."""
    return CheckReply(_problem(compiler, request), request.number)


def _problem(compiler: GrammarCompiler, request: CheckRequest) -> str:
    before = time.process_time()
    try:
        grammar = compiler.compile(request.constraint)
        if (took := time.process_time() - before) > COMPILE_S:
            return f"it takes {took:.2f} s to compile, and {COMPILE_S:g} s are the limit"
        if request.first is None:
            try_out(grammar, TEXTS if request.constraint.kind == "grammar" else 1)
            try_patterns(compiler, request.constraint)
        elif not grammar.allows(request.first):
            return f"the first token, {request.first}, is not allowed"
        return ""
    except GrammarError as error:
        return str(error)


class _Forks:
    """The copies of this process that compile."""

    def __init__(self, compiler: GrammarCompiler, check_s: float, replies: int) -> None:
        self._compiler, self._check_s, self._replies = compiler, check_s, replies
        self._numbers: dict[int, int] = {}  # by process id

    def begin(self, request: CheckRequest) -> None:
        """Answer a request from a copy of this process."""
        parent = os.getpid()
        if (process := os.fork()) != 0:
            self._numbers[process] = request.number
            return
        status = 1
        try:
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            os.nice(NICE)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
            signal.setitimer(signal.ITIMER_PROF, self._check_s)
            _write(self._replies, check(self._compiler, request))
            status = 0
        finally:
            os._exit(status)

    def reap(self) -> None:
        """Answer for those that have ended without an answer."""
        while self._numbers:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            number = self._numbers.pop(process)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                why = f"it takes longer than {self._check_s:g} s to compile and try out, which is the limit"
                _write(self._replies, CheckReply(why, number))
            elif status:
                _write(self._replies, CheckReply("it takes more memory to compile than a constraint may", number))


def serve(given: int, replies: int) -> None:
    """Answer the requests of one descriptor at another one until there are no more.

    poll ─┬─ a request has come ─► fork ─► reply, or end
          └─ a copy has ended ───► reply for it if it had none
    """
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    lines, rest = [], b""
    forks: _Forks | None = None
    while True:
        ready, _, _ = select.select((given, ended), (), ())
        if ended in ready:
            with suppress(BlockingIOError):
                os.read(ended, READ_BYTES)
            if forks is not None:
                forks.reap()
        if given not in ready:
            continue
        if not (part := os.read(given, READ_BYTES)):
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if forks is None:
                forks = _load(msgspec.json.decode(line, type=CheckerConfig), replies)
            else:
                forks.begin(msgspec.json.decode(line, type=CheckRequest))


def _load(config: CheckerConfig, replies: int) -> _Forks:
    compiler = GrammarCompiler(config.model, config.cache_dir, config.words)
    ready = CheckReply()
    try:
        compiler.load()
    except GrammarError as error:
        ready = CheckReply(str(error))
    _write(replies, ready)
    return _Forks(compiler, config.check_s, replies)


def _write(replies: int, reply: CheckReply) -> None:
    """In one piece: replies are shorter than what pipes take so."""
    os.write(replies, msgspec.json.encode(reply) + b"\n")


def main() -> int:
    """Run as the child of the process whose id is the first argument."""
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_parent()
    with suppress(OSError, ValueError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.fileno(), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
