"""Text to tokens and back, with the Rust library alone; every method may be called from any thread."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import jinja2
import tokenizers

from headrace.core.types.errors import HeadraceError, invalid
from headrace.engine.model.source import resolve_source
from headrace.engine.model.stub import CHAT_TEMPLATE, END, stub_tokenizer
from headrace.server.tokenizer.chat_template import ChatTemplate
from headrace.server.tokenizer.store import load_record

MAX_STOP_IDS = 512  # a stop string that more tokens contain than this is looked for in the text only
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes and decodes with a Rust tokenizer (its methods do not mutate it).

    eos_ids: ids that end a text. template: None for a model that knows no conversations.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: tuple[int, ...] = (), template: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self._template = template
        self.eos_ids = eos_ids
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))

    def warm_up(self) -> None:
        """Do what the first request would otherwise have to wait for."""
        self._backend.encode("warm up")
        self.piece(0)
        if self._template is not None:
            with contextlib.suppress(HeadraceError):  # a template may refuse this; it has been compiled
                self.encode_chat([{"role": "user", "content": "warm up"}])

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens (such as BOS) that the model expects around one."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ending where the assistant is to speak. Raises HeadraceError (400) for one that the
        chat template refuses, or when the model has no template."""
        if self._template is None:
            raise invalid("messages", "this model has no chat template: send a prompt instead", code="no_chat_template")
        try:
            text = self._template.render(messages)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise invalid("messages", f"the model's chat template refuses these messages: {error}") from error
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def piece(self, token: int) -> str:
        """Text of one token by itself, special tokens included; "" for ids that have none."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else ""

    def piece_bytes(self, token: int) -> bytes:
        """Bytes of one token, also when they are only a part of a character."""
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        if "\N{REPLACEMENT CHARACTER}" in self.piece(token):
            table = _byte_characters()
            if all(character in table for character in name):
                return bytes(table[character] for character in name)
        return self.piece(token).encode()

    def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of the tokens whose text contains a whole stop string: each of them ends the text by itself.
        Stop strings that too many tokens contain give none; they are found in the text."""
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


@cache
def _byte_characters() -> dict[str, int]:
    """The printable stubs that byte-level BPE uses for bytes (Radford et al. 2019, GPT-2's encoder), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def load_tokenizer(model: str, cache_dir: str) -> Tokenizer:
    """The tokenizer of what --model names. cache_dir: where converted ones are kept, "" for nowhere.

    Raises ConfigError, saying why there is none.
    """
    source = resolve_source(model)
    if source.kind == "stub":
        return Tokenizer(stub_tokenizer(model), (END,), ChatTemplate(CHAT_TEMPLATE, {}))
    record = load_record(source, cache_dir)
    template = ChatTemplate(record.chat_template, record.special_tokens) if record.chat_template else None
    return Tokenizer(tokenizers.Tokenizer.from_str(record.backend), record.eos_ids, template)
