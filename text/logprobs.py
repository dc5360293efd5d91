"""Log probabilities in responses: the native API, and OpenAI's completions and chat completions."""

from collections.abc import Iterator, Sequence

import msgspec

from headrace.core.types.requests.request import TokenLogprob
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens of a position."""

    id: int
    text: str
    logprob: float


class LogprobEntry(msgspec.Struct, frozen=True, gc=False):
    """One token in the native API."""

    id: int
    text: str
    logprob: float
    top_logprobs: list[TopLogprob]

    def plain(self) -> TokenLogprob:
        """Drops the texts."""
        tops = self.top_logprobs
        return TokenLogprob(self.id, self.logprob, tuple(t.id for t in tops), tuple(t.logprob for t in tops))


class ChatToken(msgspec.Struct):
    """A token and its logprob."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(ChatToken):
    """A token of a message."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct):
    """Of the tokens of a message."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Of the tokens of a choice, one entry each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def top_logprobs(value: TokenLogprob) -> Iterator[tuple[int, float]]:
    """Token ids and logprobs of the most likely tokens."""
    return zip(value.top_ids, value.top_logprobs, strict=True)


def native_entry(tokenizer: Tokenizer, value: TokenLogprob) -> LogprobEntry:
    """One token's logprobs in the native API."""
    tops = [TopLogprob(token, tokenizer.piece(token), logprob) for token, logprob in top_logprobs(value)]
    return LogprobEntry(value.token, tokenizer.piece(value.token), value.logprob, tops)


def native_entries(tokenizer: Tokenizer, values: Sequence[TokenLogprob | None]) -> list[LogprobEntry | None] | None:
    """Logprobs of several tokens in the native API; None if there are none."""
    return [None if value is None else native_entry(tokenizer, value) for value in values] or None


def chat_logprobs(tokenizer: Tokenizer, values: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The "logprobs" object of a chat choice."""
    return ChatLogprobs([_chat_token_logprob(tokenizer, value) for value in values])


def _chat_token_logprob(tokenizer: Tokenizer, value: TokenLogprob) -> ChatTokenLogprob:
    piece, raw = tokenizer.piece(value.token), tuple(tokenizer.piece_bytes(value.token))
    tops = [
        ChatToken(tokenizer.piece(token), logprob, tuple(tokenizer.piece_bytes(token)))
        for token, logprob in top_logprobs(value)
    ]
    return ChatTokenLogprob(piece, value.logprob, raw, tops)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[tuple[int, TokenLogprob | None]], offsets: Sequence[int]
) -> CompletionLogprobs:
    """The "logprobs" object of a completion choice, of tokens and their logprobs. offsets: characters before each.
    The alternatives include the token itself, as OpenAI's do: one more where it is none of them."""
    return CompletionLogprobs(
        tokens=[token_name(tokenizer, token) for token, _ in tokens],
        token_logprobs=[None if value is None else value.logprob for _, value in tokens],
        top_logprobs=[None if value is None else _alternatives(tokenizer, value) for _, value in tokens],
        text_offset=list(offsets),
    )


def text_offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Characters before each of these tokens, of a text that begins with them."""
    text, offsets, offset = Detokenizer(tokenizer), [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(text.push(token))
    return offsets


def _alternatives(tokenizer: Tokenizer, value: TokenLogprob) -> dict[str, float]:
    found = {token_name(tokenizer, token): logprob for token, logprob in top_logprobs(value)}
    found.setdefault(token_name(tokenizer, value.token), value.logprob)
    return found


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token, or its bytes if they are not UTF-8 by themselves, so that different tokens differ in name."""
    raw = tokenizer.piece_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
