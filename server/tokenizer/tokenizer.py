"""Text to token ids and back, by the tokenizers library. Every method may be called from any thread."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import tokenizers

from headrace.core.types.errors import HeadraceError, invalid
from headrace.engine.model.byte_level import byte_level_alphabet
from headrace.engine.model.source import resolve_source
from headrace.engine.model.stub import CHAT_TEMPLATE, END, stub_tokenizer
from headrace.server.tokenizer.chat_template import ChatTemplate
from headrace.server.tokenizer.store import load_record

MAX_STOP_IDS = 512  # a stop string that more tokens contain is looked for in the text only
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in enumerate(byte_level_alphabet())}


class Tokenizer:
    """Encodes and decodes with a tokenizer of the tokenizers library, whose methods do not change it.

    eos_ids: token ids that end a text. template: None for a model without a chat template.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: tuple[int, ...] = (), template: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self._template = template
        self.eos_ids = eos_ids
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))

    def warm_up(self) -> None:
        """Do the one-time work that would delay the first request."""
        self._backend.encode("warm up")
        self.piece(0)
        if self._template is not None:
            with contextlib.suppress(HeadraceError):  # a template may refuse this; it has been compiled
                self.encode_chat([{"role": "user", "content": "warm up"}])

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens (such as BOS) that the model expects around it."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins. Raises HeadraceError (400) if the chat
        template refuses it, or if the model has no template."""
        if self._template is None:
            raise invalid("messages", "this model has no chat template: send a prompt instead", code="no_chat_template")
        try:
            text = self._template.render(messages)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise invalid("messages", f"the model's chat template refuses these messages: {error}") from error
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def piece(self, token: int) -> str:
        """Text of one token by itself, special tokens included; "" for unknown ids."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else ""

    def piece_bytes(self, token: int) -> bytes:
        """Bytes of one token, which may be a part of a character."""
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        if "\N{REPLACEMENT CHARACTER}" in self.piece(token) and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return self.piece(token).encode()

    def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of tokens whose text contains a whole stop string, so that each of them ends the text by itself. None for
        stop strings that more than MAX_STOP_IDS tokens contain; those are found in the text."""
        found: dict[int, None] = {}
        for stop in stops:
            ids = [token for token, piece in enumerate(self._pieces) if stop in piece]
            if len(ids) <= MAX_STOP_IDS:
                found |= dict.fromkeys(ids)
        return tuple(found)

    @cached_property
    def _pieces(self) -> list[str]:
        ids = [[token] for token in range(self.vocab_size)]
        return [str(piece) for piece in self._backend.decode_batch(ids, skip_special_tokens=False)]


def load_tokenizer(model: str, cache_dir: str) -> Tokenizer:
    """The tokenizer of a model. model: as given by --model. cache_dir: where converted tokenizers are kept, "" for
    nowhere. Raises ConfigError if there is none that can be used."""
    source = resolve_source(model)
    if source.kind == "stub":
        return Tokenizer(stub_tokenizer(model), (END,), ChatTemplate(CHAT_TEMPLATE, {}))
    record = load_record(source, cache_dir)
    template = ChatTemplate(record.chat_template, record.special_tokens) if record.chat_template else None
    return Tokenizer(tokenizers.Tokenizer.from_str(record.backend), record.eos_ids, template)
