"""Hidden states of tokens, and draft data: what a draft model of a decode peer begins with."""

import msgspec

MAX_DRAFT_TOKENS = 64

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of hidden states, by the names of their dtypes."""


class HiddenStates(msgspec.Struct, frozen=True):
    """Hidden states after the final norm of positions [start, start + count): what the output head multiplies."""

    start: int
    size: int
    """Elements of one state."""
    dtype: str
    """float32, bfloat16 or float16: in which the stage computes."""
    data: bytes
    """[count, size], C-contiguous, little-endian."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.size * DTYPE_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """Number of states."""
        return len(self.data) // self.state_bytes

    def at(self, position: int) -> "HiddenStates | None":
        """The state of one position alone; None if it is not among these."""
        offset = (position - self.start) * self.state_bytes
        if not 0 <= offset < len(self.data):
            return None
        return HiddenStates(position, self.size, self.dtype, self.data[offset : offset + self.state_bytes])


class DraftTokens(msgspec.Struct, frozen=True):
    """The most likely tokens of a position, best first, and their probabilities: softmax of the model's logits, before
    temperature and filters."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    def best(self, count: int) -> "DraftTokens | None":
        """The first so many of them; None for none."""
        return DraftTokens(self.ids[:count], self.probs[:count]) if count else None


class DraftTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of draft data is wanted."""

    hidden: bool = False
    """The hidden state of the last prompt token."""
    top_k: int = 0
    """So many of the most likely first tokens."""


NO_DRAFT = DraftTerms()


class Draft(msgspec.Struct, frozen=True, omit_defaults=True):
    """What goes to a decode peer beside the first token."""

    hidden: HiddenStates | None = None
    """Hidden states of the last prompt token."""
    tokens: DraftTokens | None = None
    """Draft tokens beside the first generated token."""
