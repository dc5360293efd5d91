"""The digest of effects: equal for a call and its replay, whether token ids were hidden or not. Pure."""

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from headrace.core.messages.kv_events import BlockRemoved, BlockStored
from headrace.core.messages.replies import StageTraced
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.images import ImageInput
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.recording.rewriting import Rewriter
from headrace.scheduler.recording.snapshot import Rules
from headrace.scheduler.state.events import Effect

DIGEST_BYTES = 8
_HASH = re.compile(r"\b(?:hidden:)?[0-9a-f]{64}\b")

BULK: Rules = {
    ImageInput: {"pixels": lambda _image: b""},
    HiddenStates: {"data": lambda states: bytes(len(states.data))},
    StageTraced: {"spans": lambda _traced: b""},
}
"""What the scheduler passes on unread."""

_DERIVED: Rules = {
    **BULK,
    BlockStored: {
        "block_hashes": lambda event: (0,) * len(event.block_hashes),
        "parent_block_hash": lambda event: None if event.parent_block_hash is None else 0,
    },
    BlockRemoved: {"block_hashes": lambda event: (0,) * len(event.block_hashes)},
    Reservation: {"prompt_hash": lambda reservation: reservation.prompt_hash and "hash"},
    ErrorInfo: {"message": lambda error: _HASH.sub("hash", error.message)},
}
"""What follows from token ids: it is another where these are hidden."""

_without_derived = Rewriter(_DERIVED)


def digest(effects: Iterable[Effect]) -> int:
    """64 bits over the effects of one call: all of their fields, in order, without what the scheduler passes on unread
    and what follows from token ids. 0 for none."""
    found: Any = None
    for effect in effects:
        if found is None:
            found = blake2b(digest_size=DIGEST_BYTES)
        found.update(repr(_without_derived(effect)).encode())  # msgpack leaves out defaults, or not, by identity
    return 0 if found is None else int.from_bytes(found.digest(), "little")
