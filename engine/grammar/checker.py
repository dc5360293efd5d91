"""The process that compiles clients' constraints before they are admitted: `python -m headrace.engine.grammar.checker
PARENT_PID`, CheckerConfig as a line of JSON on standard input, then a line for each CheckRequest, answered by a line
with a CheckReply. The first reply says that the vocabulary is loaded.

A process of its own, which its parent may end: loading the vocabulary holds the GIL, and a hostile constraint costs no
more than the time and memory that this process is given.
"""

import resource
import sys
from contextlib import suppress
from typing import BinaryIO

import msgspec

from headrace.core.runtime.process import die_with_parent, leave_signals_to_parent
from headrace.core.types.constraint import Constraint
from headrace.engine.grammar.compiler import GrammarCompiler, GrammarError
from headrace.engine.grammar.trial import try_out, try_patterns

MEMORY_BYTES = 4 << 30  # of address space


class CheckerConfig(msgspec.Struct, frozen=True):
    """What the process is told when it starts; see GrammarCompiler."""

    model: str
    cache_dir: str
    words: int


class CheckRequest(msgspec.Struct, frozen=True):
    """A constraint to compile."""

    constraint: Constraint
    first: int | None = None
    """A first token that it has to allow; None: whether it can be compiled."""


class CheckReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a CheckRequest."""

    error: str = ""
    """Why it cannot be compiled or does not allow the token; "": it does."""


def check(compiler: GrammarCompiler, request: CheckRequest) -> CheckReply:
    """Compile a constraint and try it out."""
    try:
        grammar = compiler.compile(request.constraint)
        if request.first is None:
            try_out(grammar)
            try_patterns(compiler, request.constraint)
        elif not grammar.allows(request.first):
            return CheckReply(f"the first token, {request.first}, is not allowed")
        return CheckReply()
    except GrammarError as error:
        return CheckReply(str(error))


def serve(given: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    config = msgspec.json.decode(given.readline(), type=CheckerConfig)
    compiler = GrammarCompiler(config.model, config.cache_dir, config.words)
    ready = CheckReply()
    try:
        compiler.load()
    except GrammarError as error:
        ready = CheckReply(str(error))
    _write(replies, ready)
    for line in given:
        _write(replies, check(compiler, msgspec.json.decode(line, type=CheckRequest)))


def _write(replies: BinaryIO, reply: CheckReply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")
    replies.flush()


def main() -> int:
    """Run as the child of the process whose id is the first argument."""
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_parent()
    with suppress(OSError, ValueError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
