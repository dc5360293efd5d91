"""When requests are sent, and what they ask for: lengths, and token ids by the texts that prompts share.

Prompts are lists of segments, each the beginning of a numbered text, as in traces: equal texts are equal tokens, so
shared prefixes are shared in the server's prefix cache too. Token ids are drawn from the seed and the number of the
text when they are needed: a trace's prompts do not fit into memory at once.
"""

import random
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

BURST = float("inf")
FIRST_ID, LAST_ID = 32, 199  # of prompts; every vocabulary has them, and special tokens are rarely among them
PREFIX_TEXTS = 1 << 40  # numbers from here on are shared prefixes
WARMUP_TEXTS = 1 << 41  # and from here on the prompts of warm-up


class Lengths(msgspec.Struct, frozen=True):
    """Token counts, uniform between both ends."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        """As on the command line."""
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request of the measurement."""

    due_s: float
    """When it is to be sent, seconds since the start; 0 where a fixed number is kept open."""
    segments: tuple[tuple[int, int], ...]
    """Number of a text and tokens of its beginning; empty where the prompt is a text."""
    text: str
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        """Prompt tokens; 0 where the prompt is a text."""
        return sum(tokens for _, tokens in self.segments)


def synthetic(
    count: int, input_len: Lengths, output_len: Lengths, prefix_len: int, prefixes: int, draw: random.Random
) -> list[PlannedRequest]:
    """Prompts that are unique but for their first prefix_len tokens, which are one of so many prefixes. input_len
    counts the prefix."""
    planned = []
    for number in range(count):
        tokens, output = input_len.draw(draw), output_len.draw(draw)
        shared = min(prefix_len, tokens)
        segments = [(PREFIX_TEXTS + draw.randrange(prefixes), shared), (number, tokens - shared)]
        planned.append(PlannedRequest(0.0, tuple(part for part in segments if part[1]), "", output))
    return planned


def from_texts(texts: Sequence[str], count: int, output_len: Lengths, draw: random.Random) -> list[PlannedRequest]:
    """Prompts that are given as texts, again from the first one when there are no more."""
    return [PlannedRequest(0.0, (), texts[number % len(texts)], output_len.draw(draw)) for number in range(count)]


def cut(requests: Iterable[PlannedRequest], most: int) -> list[PlannedRequest]:
    """The requests with prompts of at most so many tokens, longer ones without their end."""
    return [msgspec.structs.replace(request, segments=_first(request.segments, most)) for request in requests]


def warmup(requests: Sequence[PlannedRequest], count: int) -> list[PlannedRequest]:
    """Requests as long as the first ones that share no token with them, so that the prefix cache stays cold."""
    found = []
    for number in range(count):
        like = requests[number % len(requests)]
        segments = ((WARMUP_TEXTS + number, like.input_tokens),) if like.segments else ()
        found.append(msgspec.structs.replace(like, due_s=0.0, segments=segments))
    return found


def arrival_times(count: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Seconds since the start of the measurement at which so many requests are sent, the first at 0.

    rate: requests a second; BURST for all at once. burstiness: shape of the gamma distribution of the gaps, whose mean
    is 1 / rate: 1 is a Poisson process, less is burstier, more is steadier.
    """
    if rate == BURST:
        return [0.0] * count
    times, at = [], 0.0
    for _ in range(count):
        times.append(at)
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def token_ids(request: PlannedRequest, seed: int) -> list[int]:
    """Token ids of a prompt."""
    ids: list[int] = []
    for text, tokens in request.segments:
        source = np.random.default_rng((seed, text))
        ids += source.integers(FIRST_ID, LAST_ID + 1, tokens, dtype=np.int64).tolist()
    return ids


def _first(segments: Sequence[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
    kept: list[tuple[int, int]] = []
    for text, tokens in segments:
        if most <= 0:
            break
        kept.append((text, min(tokens, most)))
        most -= tokens
    return tuple(kept)
