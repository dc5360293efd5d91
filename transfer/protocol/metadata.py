"""Metadata row codec: first token, logprobs and token counts of a request, in a fixed layout of 256 bytes.

Version 1, little-endian. docs/protocol.md has the table; a cleared row is all zeros, so its version is 0.
"""

import math
from typing import NamedTuple

import numpy as np

from headrace.core.types.kv.kv_tiers import TIERS, TierTokens
from headrace.core.types.requests.request import PREFIX, FirstToken, TokenLogprob
from headrace.transfer.protocol.checksum import of_ticket

VERSION = 1
ROW_BYTES = 256
MAX_TOP = 20
HAS_LOGPROB = 1
FINISH_REASONS = ("", "stop", "length", PREFIX)  # the row stores the index

ROW = np.dtype(
    {
        "names": [
            "version", "flags", "finish_reason", "top_count", "ticket_hash", "generation", "token",
            "prompt_tokens", "cached_tokens", "logprob", "top_ids", "top_logprobs", "next_position",
            "cached_host", "cached_disk", "cached_library",
        ],
        "formats": [
            "<u2", "<u2", "u1", "u1", "<u8", "<u8", "<i4", "<i4", "<i4", "<f4", ("<i4", MAX_TOP), ("<f4", MAX_TOP),
            "<i4", "<i4", "<i4", "<i4",
        ],
        "offsets": [0, 2, 4, 5, 8, 16, 24, 28, 32, 36, 40, 120, 200, 204, 208, 212],
        "itemsize": ROW_BYTES,
    }
)  # fmt: skip


class Metadata(NamedTuple):
    """A decoded metadata row."""

    ticket_hash: int
    generation: int
    first: FirstToken

    def belongs_to(self, ticket: str, generation: int) -> bool:
        """Whether the row is of this use of the ticket."""
        return self.generation == generation and self.ticket_hash == of_ticket(ticket)


def encode(ticket: str, generation: int, first: FirstToken) -> bytes:
    """Encodes one row. Logprobs are stored as float32. Raises ValueError for more than MAX_TOP alternatives."""
    row = np.zeros((), ROW)
    row["version"] = VERSION
    row["ticket_hash"] = of_ticket(ticket)
    row["generation"] = generation
    row["token"] = first.token
    row["prompt_tokens"] = first.prompt_tokens
    row["cached_tokens"] = first.cached_tokens
    for tier in TIERS:
        row[f"cached_{tier}"] = getattr(first.from_tiers, tier)
    row["next_position"] = first.next_position
    row["finish_reason"] = FINISH_REASONS.index(first.finish_reason)
    if first.logprob is not None:
        top = len(first.logprob.top_ids)
        if top > MAX_TOP or top != len(first.logprob.top_logprobs):
            raise ValueError(f"a metadata row holds up to {MAX_TOP} pairs of alternatives, not {top}")
        row["flags"] = HAS_LOGPROB
        row["logprob"] = first.logprob.logprob
        row["top_count"] = top
        row["top_ids"][:top] = first.logprob.top_ids
        row["top_logprobs"][:top] = first.logprob.top_logprobs
    return row.tobytes()


def decode(data: bytes | memoryview) -> Metadata:
    """Decodes one row. Raises ValueError for another version or impossible values, naming what was found.

    The caller still has to compare it with the request's prompt and the model's vocabulary.
    """
    if len(data) != ROW_BYTES:
        raise ValueError(f"a metadata row has {ROW_BYTES} bytes, not {len(data)}")
    row = np.frombuffer(data, ROW)[0]
    if row["version"] != VERSION:
        raise ValueError(f"metadata row version {row['version']}, expected {VERSION}")
    if row["finish_reason"] >= len(FINISH_REASONS):
        raise ValueError(f"metadata row has finish reason {row['finish_reason']}, expected < {len(FINISH_REASONS)}")
    if row["top_count"] > MAX_TOP:
        raise ValueError(f"metadata row has {row['top_count']} alternatives, expected at most {MAX_TOP}")
    counts = [int(row[name]) for name in ("prompt_tokens", "cached_tokens")]
    from_tiers = TierTokens(*(int(row[f"cached_{tier}"]) for tier in TIERS))
    if min(row["token"], *counts, from_tiers.host, from_tiers.disk, from_tiers.library) < 0:
        raise ValueError("metadata row has a negative token or count")
    if row["cached_tokens"] > row["prompt_tokens"]:
        raise ValueError(f"metadata row has {row['cached_tokens']} cached of {row['prompt_tokens']} prompt tokens")
    if (loaded := from_tiers.total) > row["cached_tokens"]:
        raise ValueError(f"metadata row has {loaded} tokens from tiers of {row['cached_tokens']} cached ones")
    if not 0 <= row["next_position"] <= row["prompt_tokens"]:
        raise ValueError(f"metadata row goes on at {row['next_position']} behind {row['prompt_tokens']} prompt tokens")
    logprob = _logprob(row) if row["flags"] & HAS_LOGPROB else None
    if logprob is not None and min(logprob.top_ids, default=0) < 0:
        raise ValueError(f"metadata row has the token {min(logprob.top_ids)} among its alternatives")
    if logprob is not None and not all(map(math.isfinite, (logprob.logprob, *logprob.top_logprobs))):
        raise ValueError("metadata row has a logprob that is not finite")
    first = FirstToken(
        token=int(row["token"]),
        prompt_tokens=int(row["prompt_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        logprob=logprob,
        finish_reason=FINISH_REASONS[row["finish_reason"]],
        from_tiers=from_tiers,
        next_position=int(row["next_position"]),
    )
    return Metadata(int(row["ticket_hash"]), int(row["generation"]), first)


def first_token(data: bytes | memoryview, ticket: str, generation: int) -> FirstToken:
    """What the row of this use of a ticket holds. Raises ValueError as decode(), and for the row of another use."""
    row = decode(data)
    if not row.belongs_to(ticket, generation):
        raise ValueError(f"metadata of another ticket, or of generation {row.generation}")
    return row.first


def _logprob(row: np.void) -> TokenLogprob:
    top = int(row["top_count"])
    return TokenLogprob(
        token=int(row["token"]),
        logprob=float(row["logprob"]),
        top_ids=tuple(row["top_ids"][:top].tolist()),
        top_logprobs=tuple(row["top_logprobs"][:top].tolist()),
    )


class MetadataRows:
    """Metadata rows of one stage. A row is set once, and cleared before it serves another request."""

    def __init__(self, rows: int) -> None:
        self._rows = np.zeros((rows, ROW_BYTES), np.uint8)

    def __len__(self) -> int:
        return len(self._rows)

    def is_clear(self, row: int) -> bool:
        """Whether the row is unused."""
        return not self._rows[row].any()

    def set(self, row: int, data: bytes | memoryview) -> None:
        """Stores a row of ROW_BYTES. Raises ValueError if the row is in use."""
        if not self.is_clear(row):
            raise ValueError(f"metadata row {row} is in use")
        self._rows[row] = np.frombuffer(data, np.uint8)

    def read(self, row: int) -> Metadata:
        """Decodes a row. Raises ValueError if it is unused."""
        return decode(self._rows[row].tobytes())

    def clear(self, row: int) -> None:
        """Makes the row available again."""
        self._rows[row] = 0
