"""Draft frame codec: the hidden state of the last prompt token and the most likely first tokens, for a draft model.

Version 1, little-endian. docs/protocol.md has the table.
"""

import math

import numpy as np

from headrace.core.types.requests.draft import DTYPE_BYTES, MAX_DRAFT_TOKENS, Draft, DraftTokens, HiddenStates
from headrace.transfer.protocol.checksum import of_ticket

VERSION = 1
DTYPES = ("", *DTYPE_BYTES)  # the frame stores the index; 0: no hidden state
MAX_BYTES = 1 << 20

HEAD = np.dtype(
    {
        "names": ["version", "dtype", "top_count", "ticket_hash", "generation", "position", "hidden_size"],
        "formats": ["<u2", "u1", "<u2", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 2, 4, 8, 16, 24, 28],
        "itemsize": 32,
    }
)


def encode(ticket: str, generation: int, draft: Draft) -> bytes:
    """Encodes one frame. Raises ValueError for more than MAX_DRAFT_TOKENS tokens, several hidden states, or more than
    MAX_BYTES."""
    head = np.zeros((), HEAD)
    head["version"] = VERSION
    head["ticket_hash"] = of_ticket(ticket)
    head["generation"] = generation
    tokens, hidden = draft.tokens or DraftTokens((), ()), draft.hidden
    if len(tokens.ids) > MAX_DRAFT_TOKENS or len(tokens.ids) != len(tokens.probs):
        raise ValueError(f"a draft frame holds up to {MAX_DRAFT_TOKENS} tokens, not {len(tokens.ids)}")
    head["top_count"] = len(tokens.ids)
    if hidden is not None:
        if hidden.count != 1:
            raise ValueError(f"a draft frame holds one hidden state, not {hidden.count}")
        head["dtype"] = DTYPES.index(hidden.dtype)
        head["position"] = hidden.start
        head["hidden_size"] = hidden.size
    data = [
        head.tobytes(),
        np.array(tokens.ids, "<i4").tobytes(),
        np.array(tokens.probs, "<f4").tobytes(),
        hidden.data if hidden is not None else b"",
    ]
    if (size := sum(map(len, data))) > MAX_BYTES:
        raise ValueError(f"a draft frame has up to {MAX_BYTES} bytes, not {size}")
    return b"".join(data)


def decode(data: bytes | memoryview, ticket: str, generation: int) -> Draft:
    """Decodes the frame of this use of a ticket. Raises ValueError for another version, ticket or size, or impossible
    values, naming what was found.

    The caller still has to compare the hidden state's position with the prompt, and ids with the vocabulary.
    """
    if len(data) < HEAD.itemsize:
        raise ValueError(f"a draft frame has {HEAD.itemsize} bytes or more, not {len(data)}")
    head = np.frombuffer(data[: HEAD.itemsize], HEAD)[0]
    if head["version"] != VERSION:
        raise ValueError(f"draft frame version {head['version']}, expected {VERSION}")
    if head["ticket_hash"] != of_ticket(ticket) or head["generation"] != generation:
        raise ValueError(f"a draft frame of another ticket, or of generation {head['generation']}")
    if head["dtype"] >= len(DTYPES):
        raise ValueError(f"draft frame has dtype {head['dtype']}, expected < {len(DTYPES)}")
    dtype, count, size = DTYPES[head["dtype"]], int(head["top_count"]), int(head["hidden_size"])
    expected = HEAD.itemsize + 8 * count + (size * DTYPE_BYTES[dtype] if dtype else 0)
    if count > MAX_DRAFT_TOKENS or bool(dtype) != bool(size) or len(data) != expected:
        raise ValueError(
            f"draft frame of {count} tokens and {size} elements has {len(data)} bytes, expected {expected}"
        )
    body = bytes(data[HEAD.itemsize :])
    tokens = _tokens(np.frombuffer(body, "<i4", count).tolist(), np.frombuffer(body, "<f4", count, 4 * count).tolist())
    hidden = HiddenStates(int(head["position"]), size, dtype, body[8 * count :]) if dtype else None
    return Draft(hidden, tokens)


def _tokens(ids: list[int], probs: list[float]) -> DraftTokens | None:
    if min(ids, default=0) < 0:
        raise ValueError(f"draft frame has the token {min(ids)}")
    if not all(math.isfinite(each) and 0 <= each <= 1.001 for each in probs):
        raise ValueError("draft frame has a probability outside 0 to 1")
    return DraftTokens(tuple(ids), tuple(probs)) if ids else None
