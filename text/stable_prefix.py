"""Which tokens of a text stay as they are when more text follows: those that an open prompt may have computed.

    text so far    … and the quick bro              tokens   …  and   the   quick   bro
    + "wn fox"     … and the quick brown fox                 …  and   the   quick   brown   fox
                                   ▲ stable so far                       ▲ MARGIN before what any probe changes

No tokenizer says this of itself: normalizers compose characters, pre-tokenizers look ahead, merges go far back. So the
last words count as open, and what may become an added token (such as <|im_end|>); the text before them is tokenized
with different things behind it, and what they change counts as open, too, with a margin. That is an expectation and no
proof. Nothing relies on it but the time that it saves: the ids of a prompt are those of its whole text, and KV that was
computed for others is not found for them.
"""

import re
from collections.abc import Callable, Iterable, Sequence

TAIL = 512  # characters whose tokens are looked at; further back than the longest merges reach
WORDS = re.compile(r"\s*\S+\s*\S+\s*\Z")  # the last two
LONG_WORDS = 64  # characters that are open at most on account of words: some scripts have no spaces
MARGIN = 2  # tokens before the first that changes
PROBES = ("a", " a", " ", "\n", "\r\n", "0", "'s", ".", "\u0301", "\u4e2d", "\U0001f642")


class StablePrefix:
    """Counts the stable tokens of texts. added: texts of the tokens that were added to the vocabulary."""

    def __init__(self, added: Iterable[str]) -> None:
        self._beginnings = {text[:length] for text in added for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def count(self, text: str, ids: Sequence[int], encode: Callable[[list[str]], list[list[int]]]) -> int:
        """How many of the ids of a text are expected to stay. encode: ids of each of several texts."""
        if not text:
            return 0
        cut = self._settled(text)
        start = max(0, cut - TAIL)
        words = WORDS.search(text, max(start, cut - LONG_WORDS), cut)
        cut = max(start, cut - LONG_WORDS) if words is None else words.start()
        tail = text[start:cut]
        plain, *probed = encode([text[start:], *(tail + probe for probe in PROBES)])
        kept = min(common_length(plain, each) for each in probed)
        return max(0, len(ids) - (len(plain) - kept) - MARGIN)

    def _settled(self, text: str) -> int:
        """Characters before the first one that may begin an added token which the text ends within."""
        first = max(0, len(text) - self._longest)
        return next((at for at in range(first, len(text)) if text[at:] in self._beginnings), len(text))


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
