"""Text to token ids and back, by the tokenizers library. Every method may be called from any thread."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import decoders

from headrace.core.types.errors import TOO_LONG, ConfigError, HeadraceError, invalid, shown
from headrace.engine.model.byte_level import byte_level_alphabet
from headrace.engine.model.source import resolve_source
from headrace.engine.model.stub import CHAT_TEMPLATE, END, stub_tokenizer
from headrace.engine.model.tokenizer_store import load_record
from headrace.text.byte_fallback import (
    BYTE_OF,
    BYTE_TOKENS,
    REPLACEMENT,
    decodes_byte_tokens,
    with_whole_characters,
)
from headrace.text.chat_template import REFUSALS, ChatTemplate, TemplateUse
from headrace.text.detokenizer import TokenDecoder
from headrace.text.stable_prefix import StablePrefix, common_length
from headrace.text.token_length import TokenBound, length_bound

MAX_STOP_IDS = 512  # a stop string that more tokens contain is looked for in the text only
# Longer texts are refused without being tokenized, which takes a second and 100 MB for each MB of them.
TEXT_BYTES_PER_TOKEN = 16  # of the model's length; most texts have about four
SHORT_TEXT_BYTES = 1 << 20  # whatever the model's length
_BYTES = {character: byte for byte, character in enumerate(byte_level_alphabet())}


class Tokenizer:
    """Encodes and decodes with a tokenizer of the tokenizers library, whose methods do not change it.

    eos_ids: token ids that end a text. template: None for a model without a chat template. tool_template: the one for
    conversations with tools, if there is another.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: tuple[int, ...] = (),
        template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._template = template
        self.tool_template = tool_template or template
        """The chat template for conversations with tools; None for a model without a chat template."""
        self.eos_ids = eos_ids
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))

    def warm_up(self) -> None:
        """Do the one-time work that would delay the first request."""
        self.encode("warm up", 1 << 10)
        self.piece(0)
        if self._template is not None:
            with contextlib.suppress(HeadraceError):  # a template may refuse this; it has been compiled
                self.encode_chat([{"role": "user", "content": "warm up"}])

    def encode(self, text: str, limit: int = 0, field: str = "prompt", *, special: bool = True) -> list[int]:
        """Token ids of a plain prompt. special: with the special tokens (such as BOS) that the model expects around it.
        Raises HeadraceError (400) for one of `limit` tokens or more (0: no limit), or too long to be tokenized."""
        return self._ids(text, limit, field, special=special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int = 0,
        field: str = "messages",
        tools: Sequence[Mapping[str, Any]] = (),
        use: TemplateUse = TemplateUse(),  # noqa: B008 - immutable
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins. Raises HeadraceError (400) as encode()
        does, if the chat template refuses it, or if the model has no template."""
        template = self.tool_template if tools else self._template
        if template is None:
            raise invalid(field, "this model has no chat template: send a prompt instead", code="no_chat_template")
        try:
            text = template.render(messages, tools, use)
        except REFUSALS as error:
            message = f"the model's chat template refuses these messages: {shown(str(error), 300)}"
            raise invalid(field, message) from error
        return self._ids(text, limit, field, special=False)

    def encode_open(self, text: str, limit: int = 0, field: str = "prompt") -> tuple[list[int], int]:
        """Token ids of a plain prompt as encode() has them, and how many of them are not expected to change whatever
        text follows (see stable_prefix.py)."""
        ids = self.encode(text, limit, field)
        return ids, min(len(ids), self._stable.count(text, ids, lambda texts: self._batch(texts, special=True)))

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text that its first tokens, as encode() has them, are made of."""
        (encoding,) = self._backend.encode_batch([text])
        return text[: max((end for _, end in encoding.offsets[:tokens]), default=0)]

    def encode_open_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int = 0,
        field: str = "messages",
        tools: Sequence[Mapping[str, Any]] = (),
        use: TemplateUse = TemplateUse(),  # noqa: B008 - immutable
    ) -> tuple[list[int], int]:
        """Token ids of a conversation as encode_chat() has them, and how many of them are not expected to change
        whatever messages follow: those of the text that is the same with one message more."""
        ids = self.encode_chat(messages, limit, field, tools, use)
        template = self.tool_template if tools else self._template
        assert template is not None, "encode_chat() has refused it"
        text = template.common_text(messages, tools, use)
        (begun,) = self._batch([text], special=False) if text else ([],)
        stable = self._stable.count(text, begun, lambda texts: self._batch(texts, special=False))
        return ids, common_length(begun[:stable], ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no whole UTF-8 character become U+FFFD."""
        if self._has_byte_tokens(ids):
            return self._decode_names(ids, skip_special=skip_special)
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def _has_byte_tokens(self, ids: Sequence[int]) -> bool:
        return bool(self._byte_ids) and not self._byte_ids.isdisjoint(ids)

    def _decode_names(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The same for ids with byte tokens among them."""
        left_out = self._special_ids if skip_special else frozenset()
        names = (self._backend.id_to_token(token) for token in ids if token not in left_out)
        return str(self._backend.decoder.decode(with_whole_characters(name for name in names if name is not None)))

    def showing(self, tokens: Collection[int]) -> TokenDecoder:
        """A decoder that leaves out special tokens but these."""
        hidden = self._special_ids.difference(tokens)
        return self if hidden == self._special_ids else _PartlySpecial(self, hidden)

    def added_id(self, text: str) -> int | None:
        """Id of the token with this text that was added to the vocabulary; None if there is none."""
        return self._added_ids.get(text)

    def decode_long(self, ids: Sequence[int]) -> str:
        """The same without the GIL where there are no byte tokens, for ids that take long."""
        if self._has_byte_tokens(ids):
            return self._decode_names(ids, skip_special=True)
        return str(self._backend.decode_batch([list(ids)], skip_special_tokens=True)[0])

    def piece(self, token: int) -> str:
        """What one token adds to a text, special tokens included; "" for unknown ids."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else ""

    def piece_bytes(self, token: int) -> bytes:
        """Bytes of one token, which may be a part of a character."""
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._byte_ids:
            return bytes([BYTE_OF[name]])
        if REPLACEMENT in self.piece(token) and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return self.piece(token).encode()

    def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of tokens whose text contains a whole stop string, so that each of them ends the text by itself. None for
        stop strings that more than MAX_STOP_IDS tokens contain; those are found in the text."""
        found: dict[int, None] = {}
        for stop in stops:
            pairs = enumerate(zip(self._pieces, self._texts, strict=True))
            ids = [token for token, (inside, alone) in pairs if stop in inside and stop in alone]
            if len(ids) <= MAX_STOP_IDS:
                found |= dict.fromkeys(ids)
        return tuple(found)

    def _ids(self, text: str, limit: int, field: str, *, special: bool) -> list[int]:
        if limit:
            self._check_length(text, limit, field)
        (ids,) = self._batch([text], special=special)
        if 0 < limit <= len(ids):
            raise too_long(field, f"{len(ids)} tokens", limit)
        return ids

    def _batch(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        # Not encode(), which holds the GIL: nothing else would be served meanwhile.
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        return [list(encoding.ids) for encoding in found]

    def _check_length(self, text: str, limit: int, field: str) -> None:
        """Refuse what certainly has too many tokens, and what takes too long to find out."""
        size = len(text) if text.isascii() else len(text.encode())
        if self._bound is not None and (least := self._bound.least_tokens(text)) >= limit:
            raise too_long(field, f"{size} bytes, which are at least {least} tokens", limit)
        check_text_bytes(size, limit, field)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return length_bound(self._backend.to_str(), _BYTES)

    @cached_property
    def _stable(self) -> StablePrefix:
        return StablePrefix(self._added_ids)

    @cached_property
    def _added_ids(self) -> Mapping[str, int]:
        """By their texts."""
        return {token.content: number for number, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Tokens of single bytes; none unless the decoder knows them."""
        if not decodes_byte_tokens(self._backend.decoder):
            return frozenset()
        ids = (self._backend.token_to_id(name) for name in BYTE_TOKENS)
        return frozenset(token for token in ids if token is not None)

    @cached_property
    def _texts(self) -> list[str]:
        """Texts of single tokens."""
        return self._decoded([[token] for token in range(self.vocab_size)])

    @cached_property
    def _pieces(self) -> list[str]:
        """What tokens add to the text of another one: decoders leave out the space before the first word of a text."""
        texts = self._texts
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            return texts
        added = set(self._added_ids.values())
        words = (token for token, text in enumerate(texts) if text.isalpha() and token not in added)
        if (word := next(words, None)) is None:
            return texts
        pairs = self._decoded([[word, token] for token in range(self.vocab_size)])
        before = texts[word]
        return [
            pair[len(before) :] if pair.startswith(before) else text for pair, text in zip(pairs, texts, strict=True)
        ]

    def _decoded(self, ids: list[list[int]]) -> list[str]:
        return [str(text) for text in self._backend.decode_batch(ids, skip_special_tokens=False)]


class _PartlySpecial:
    """The TokenDecoder that leaves out some special tokens."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        shown = [token for token in ids if not (skip_special and token in self._hidden)]
        return self._tokenizer.decode(shown, skip_special=False)


def check_text_bytes(size: int, limit: int, field: str, what: str = "") -> None:
    """Raises HeadraceError (400) for a text of so many bytes that takes too long to tokenize. what: it is made of."""
    longest = max(SHORT_TEXT_BYTES, TEXT_BYTES_PER_TOKEN * limit)
    if size > longest:
        raise too_long(field, f"{size} bytes{what}, and no text of more than {longest} is tokenized", limit)


def too_long(field: str, what: str, limit: int) -> HeadraceError:
    """The error for a prompt that leaves no room for an answer. what: the tokens or bytes that it has."""
    message = f"{field} has {what}; with one generated token the limit is {limit} (--max-model-len)"
    return invalid(field, message, code=TOO_LONG)


def load_tokenizer(model: str, cache_dir: str, template_file: str = "") -> Tokenizer:
    """The tokenizer of a model. model: as given by --model. cache_dir: where converted tokenizers are kept, "" for
    nowhere. template_file: of a chat template in the place of the model's, "" for the model's. Raises ConfigError if
    there is none that can be used."""
    source = resolve_source(model)
    if source.kind == "stub":
        record = None
        sources: tuple[str | None, str | None] = (CHAT_TEMPLATE, None)
    else:
        record = load_record(source, cache_dir)
        sources = (record.chat_template, record.tool_template)
    names = record.special_tokens if record else {}
    if template_file:
        given: list[ChatTemplate | None] = [_template_in(template_file, names), None]
    else:
        given = [_template_of(source.path, text, names) if text else None for text in sources]
    template, tool_template = given
    if record is None:
        return Tokenizer(stub_tokenizer(model), (END,), template, tool_template)
    return Tokenizer(tokenizers.Tokenizer.from_str(record.backend), record.eos_ids, template, tool_template)


def _template_of(model: Path, text: str, tokens: Mapping[str, str]) -> ChatTemplate:
    template = ChatTemplate(text, tokens)
    try:
        template.check()
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"the chat template of {model} cannot be used: {shown(str(error), 300)}; another one is given by "
            "--chat-template FILE"
        ) from error
    return template


def _template_in(path: str, tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        template = ChatTemplate(Path(path).read_text(encoding="utf-8"), tokens)
        template.check()
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}") from error
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} is no chat template: {shown(str(error), 300)}") from error
    return template
