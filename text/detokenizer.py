"""Incremental detokenization: whole characters only, and no part of a stop string. No I/O."""

from collections.abc import Sequence
from typing import Protocol

from headrace.text.byte_fallback import REPLACEMENT


class TokenDecoder(Protocol):
    """The part of a Tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids. More tokens change nothing of it but a U+FFFD at its end, which may be an incomplete
        character."""
        ...


class Detokenizer:
    """Decodes tokens one by one. prompt: token ids before the first one.

    Decodes a window of the last tokens and returns the text that is new, since a token's text can depend on those
    before it (leading spaces, characters of several tokens). A character that may be incomplete is held back: UTF-8
    decoding shows it as one U+FFFD at the end of the text.

    Where the window is cut, what stays has to go on as the whole would. A decoder of UTF-8 is in step again after at
    most three bytes that belong to a character before, and decoders that treat the first word of a text otherwise
    (Metaspace, WordPiece, Strip) need some text before the next token. So KEEP tokens are enough if each of them has
    some text; tokens without any (special ones, unknown ids) are kept out of the window.
    """

    WINDOW = 24  # tokens after which the window is cut
    KEEP = 8  # tokens that stay: more than the bytes of one character

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = self._end_of(prompt)
        self._text = self._decoded()
        self._given = self._stable_length(self._text)
        self._prompt_end = len(self._text)

    def push(self, token: int) -> str:
        """The text that this token adds; may be empty."""
        before = self._text
        self._ids.append(token)
        text = self._text = self._decoded()
        if text == before and self._has_no_text(token):
            self._ids.pop()
            return ""
        if len(text) > self._prompt_end:
            self._pass_prompt(text)
        end = max(self._given, self._stable_length(text))
        new, self._given = text[self._given : end], end
        if len(self._ids) > self.WINDOW:
            self._ids = self._ids[-self.KEEP :]
            self._text = self._decoded()
            self._given = self._stable_length(self._text)
        return new

    def flush(self) -> str:
        """The text that was held back. Call it when no token follows."""
        self._pass_prompt(self._text)
        new, self._given = self._text[self._given :], len(self._text)
        return new

    def _pass_prompt(self, text: str) -> None:
        """A U+FFFD that the prompt ended with, and that no token has made another character, is the prompt's own."""
        if text[self._given : self._prompt_end] == REPLACEMENT:
            self._given = self._prompt_end
        self._prompt_end = 0

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last KEEP tokens of a prompt that have a text. Twice as many are looked at until there are some."""
        count = self.KEEP
        while count < len(prompt) and len(self._decoder.decode(prompt[-count:])) < self.KEEP:
            count *= 2
        last = list(prompt[-count:])
        empty = {token for token in set(last) if self._has_no_text(token)}
        return [token for token in last if token not in empty][-self.KEEP :]

    def _has_no_text(self, token: int) -> bool:
        """Whether a token is left out wherever it stands. A space that is left out as the first one is not when it is
        repeated."""
        return not self._decoder.decode([token] * self.KEEP)

    def _decoded(self) -> str:
        return self._decoder.decode(self._ids) if self._ids else ""

    @staticmethod
    def _stable_length(text: str) -> int:
        return len(text) - text.endswith(REPLACEMENT)


class StopMatcher:
    """Finds the first stop string in a text that comes in parts; where it is split does not matter.

    The first one is the one that ends first; of those that end at the same character, the longest. keep: it is part of
    the text.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keep = keep
        self._held = ""
        self.found = ""
        """The stop string that was found."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to return, and whether a stop string was found. After that nothing must be pushed."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            self.found = buffer[start:end]
            return buffer[: end if self._keep else start], True
        hold = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold], False

    def flush(self) -> str:
        """The text that was held back as a possible beginning of a stop string. Call it when no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a proper beginning of stop."""
    return next(size for size in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:size]))


class TextStream:
    """Text of one request's tokens, up to the token or stop string that ends it.

    end_ids: token ids that end the text (EOS, the client's stop_token_ids). Neither they nor stop strings end it before
    min_tokens tokens. keep: what ends the text is part of it.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        *,
        keep: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(decoder, prompt)
        self._matcher = StopMatcher(stops, keep=keep)
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._keep = keep
        self.tokens = 0
        """Tokens pushed."""
        self.chars = 0
        """Characters that they are known to have, those that are held back or not part of the text included."""
        self.stopped = False
        """Whether a token or a stop string has ended the text."""
        self.ended_by: int | str | None = None
        """That token or stop string."""

    def push(self, token: int) -> str:
        """The text that is certain now. Sets stopped if the token ends the text; nothing must be pushed after that."""
        self.tokens += 1
        counts = self.tokens >= self._min_tokens
        if counts and token in self._end_ids:
            self.stopped = True
            text, found = self._matcher.push(self._decoded(token)) if self._keep else ("", False)
            text += "" if found else self.flush()
            self.ended_by = self._matcher.found or token
            return text
        text = self._decoded(token)
        if not counts:
            return text
        text, self.stopped = self._matcher.push(text)
        self.ended_by = self._matcher.found or None
        return text

    def flush(self) -> str:
        """The text that was held back. Call it when no token follows."""
        text, found = self._matcher.push(self._detokenizer.flush())
        return text if found else text + self._matcher.flush()

    def _decoded(self, token: int) -> str:
        text = self._detokenizer.push(token)
        self.chars += len(text)
        return text
