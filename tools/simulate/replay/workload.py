"""Requests of a trace, and the tokens of their prompts: equal prefixes in the trace are equal tokens.

A prompt is a list of segments, each the beginning of a numbered text:

    Mooncake's blocks    (block 0, 512) (block 7, 512) (block 9, 102)
    a session            (text of the session, 6,758)              a later turn has more of the same text
    with a common prefix (text of the group, 1,000) (text of the session, 5,758)
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.core.types.packed import ITEM_BYTES, pack
from headrace.scheduler.twin.pipeline import VOCABULARY


class PromptSegment(NamedTuple):
    """The first tokens of a text."""

    text: int
    """Number of the text, not negative."""

    tokens: int


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace began."""

    segments: tuple[PromptSegment, ...]
    tokens: int
    """Prompt tokens: the sum of the segments."""

    output_tokens: int = 0
    """Tokens that were generated; 0 where the trace does not say. A prefill server does not generate them."""

    tenant: str = ""
    """Whose it is; "" where the trace does not say."""

    priority: int = 0
    slo_ttft_s: float | None = None
    """Seconds within which its client would like the first token; None: it has not said."""

    cancel_s: float | None = None
    """Seconds after its arrival at which its client gives it up; None: it waits for its end."""


def prompt(request: TraceRequest, vocabulary: int = VOCABULARY) -> bytes:
    """The packed token ids of a request's prompt, all below vocabulary."""
    return packed_tokens(request.segments, vocabulary)


def packed_tokens(segments: Sequence[PromptSegment], vocabulary: int = VOCABULARY) -> bytes:
    """The packed token ids of segments."""
    return b"".join(_beginning(text, tokens, vocabulary) for text, tokens in segments)


def _beginning(text: int, tokens: int, vocabulary: int) -> bytes:
    """The first tokens of a text: its number, lowest digit first in base vocabulary, then zeros."""
    digits = [text % vocabulary]
    while text := text // vocabulary:
        digits.append(text % vocabulary)
    size = tokens * ITEM_BYTES
    return pack(digits)[:size].ljust(size, b"\0")
