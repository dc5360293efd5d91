"""Logprobs of a prompt's tokens, packed in runs of positions: decoded by their last reader alone, a run at a time."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

import msgspec

from headrace.core.types.requests.request import TokenLogprob

MOST = 512  # entries of a run; with 20 alternatives each, decoding it takes about 5 ms, in which nothing else runs

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[TokenLogprob, ...]).decode


class LogprobRun(msgspec.Struct, frozen=True):
    """Logprobs of the prompt tokens at positions [start, start + count)."""

    start: int
    count: int
    packed: bytes
    """msgpack of a list of TokenLogprob."""

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + self.count

    def entries(self) -> tuple[TokenLogprob, ...]:
        """One for each position."""
        return _decode(self.packed)


def pack_runs(start: int, entries: Sequence[TokenLogprob], most: int = MOST) -> tuple[LogprobRun, ...]:
    """Logprobs of the positions from start on, in runs of so many at most."""
    parts = [(at, entries[at : at + most]) for at in range(0, len(entries), most)]
    return tuple(LogprobRun(start + at, len(part), _encode(part)) for at, part in parts)


class PackedLogprobs(Sequence[TokenLogprob | None]):
    """One entry for each token of a prompt, None where no run has one; empty without runs. 60,000 tokens with 20
    alternatives each are some millions of objects, which take long to make and to free: here they are never all there.
    """

    def __init__(self, prompt_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self._runs: list[LogprobRun] = []  # one behind the other

    def add(self, run: LogprobRun) -> None:
        """Take in the next run. One that begins before the end of the last one begins anew there: the prompt is being
        computed again."""
        while self._runs and self._runs[-1].start >= run.start:
            self._runs.pop()
        if self._runs and self._runs[-1].end > run.start:
            last = self._runs.pop()
            self._runs += pack_runs(last.start, last.entries()[: run.start - last.start], last.count)
        self._runs.append(run)

    def __len__(self) -> int:
        return self.prompt_tokens if self._runs else 0

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        position = 0
        for run in self._runs:
            yield from (None for _ in range(position, run.start))
            yield from run.entries()
            position = run.end
        yield from (None for _ in range(position, len(self)))

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprob | None, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | tuple[TokenLogprob | None, ...] | None:
        """Takes as long as iterating up to there."""
        if isinstance(index, slice):
            return tuple(self)[index]
        position = range(len(self))[index]  # raises IndexError
        return next(islice(self, position, None))
