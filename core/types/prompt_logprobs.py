"""Logprobs of a prompt's tokens, packed in runs of positions: whoever only passes them on does not decode them."""

from collections.abc import Iterable, Sequence

import msgspec

from headrace.core.types.request import TokenLogprob

MOST = 512  # entries of a run; with 20 alternatives each, decoding it takes about 5 ms, in which nothing else runs

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[TokenLogprob, ...]).decode


class LogprobRun(msgspec.Struct, frozen=True):
    """Logprobs of the prompt tokens at positions [start, start + count)."""

    start: int
    count: int
    packed: bytes
    """msgpack of a list of TokenLogprob."""

    def entries(self) -> tuple[TokenLogprob, ...]:
        """One for each position."""
        return _decode(self.packed)


def pack_runs(start: int, entries: Sequence[TokenLogprob], most: int = MOST) -> tuple[LogprobRun, ...]:
    """Logprobs of the positions from start on, in runs of so many at most."""
    parts = [(at, entries[at : at + most]) for at in range(0, len(entries), most)]
    return tuple(LogprobRun(start + at, len(part), _encode(part)) for at, part in parts)


def unpacked(runs: Iterable[LogprobRun], prompt_tokens: int) -> tuple[TokenLogprob | None, ...]:
    """One entry for each token of a prompt, None where no run has one; nothing for no runs. Of a position that was
    computed twice the later entry counts."""
    found: list[TokenLogprob | None] = [None] * prompt_tokens
    there = False
    for run in runs:
        found[run.start : run.start + run.count] = run.entries()
        there = True
    return tuple(found) if there else ()
