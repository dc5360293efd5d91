"""Bytes that are no messages: some random, most of them messages with something wrong in them."""

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from headrace.core.messages.membership import AnyJoinReply, JoinPending, JoinRequest
from headrace.core.runtime.codec import Codec
from tests.transfer.examples import EXAMPLES

JOIN: Codec[JoinRequest] = Codec(JoinRequest)
JOIN_REPLY: Codec[AnyJoinReply] = Codec(AnyJoinReply)
VALID: tuple[bytes, ...] = (
    *(example.encoded[0] for example in EXAMPLES),
    JOIN.encode(JoinRequest(rank=0, world_size=1, incarnation="i", version="v", host="127.0.0.1", key="k")),
    JOIN_REPLY.encode(JoinPending(message="m")),
)
NESTED = b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 100_000 + b"\xc0"  # deeper than any parser's stack
NO_TEXT = b"\x82\xa4type\xa7Goodbye\xa6reason\xa2\xff\xfe"
CLAIMS = (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")


class Mutator:
    """Spoils messages, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def rubbish(self, most: int = 400) -> bytes:
        return self.random.randbytes(self.random.randrange(most))

    def spoil(self, message: bytes) -> bytes:
        """One to three of: a bit turned, a byte set, a piece cut out, repeated or put in, the end cut off."""
        data = bytearray(message)
        for _ in range(self.random.randint(1, 3)):
            at, to = sorted(self.random.randrange(len(data) + 1) for _ in range(2))
            match self.random.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << self.random.randrange(8)
                case 1 if at < len(data):
                    data[at] = self.random.choice(b"\x00\x7f\x80\x90\xa0\xc0\xc1\xc4\xc6\xcb\xcf\xd3\xdb\xdd\xdf\xff")
                case 2:
                    del data[at:to]
                case 3:
                    data[at:at] = data[at:to]
                case 4:
                    data[at:at] = self.rubbish(8)
                case _:
                    del data[at:]
        return bytes(data)

    def any(self, valid: Sequence[bytes]) -> bytes:
        """Rubbish, a spoilt message, or a good one at the wrong time."""
        draw = self.random.random()
        if draw < 0.1:
            return self.rubbish()
        if draw < 0.15:
            return self.random.choice((NESTED, NO_TEXT, *CLAIMS))
        message = self.random.choice(valid)
        return message if draw < 0.3 else self.spoil(message)


def spoilt(valid: Sequence[bytes] = VALID) -> st.SearchStrategy[bytes]:
    """The same for hypothesis, which looks for the smallest one that breaks something."""
    seeds = st.integers(0, 1 << 32)
    return st.binary(max_size=300) | st.builds(lambda seed: Mutator(seed).any(valid), seeds)
