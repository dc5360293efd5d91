"""Text to tokens and back. Wraps a Hugging Face fast tokenizer; every method may be called from any thread."""

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import jinja2

from core.errors import ConfigError, invalid
from engine.model.source import eos_token_ids, resolve_source
from engine.model.source import load_tokenizer as load_transformers_tokenizer

MAX_STOP_IDS = 512  # a stop string that more tokens contain than this is looked for in the text only
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes and decodes with the Rust tokenizer behind a transformers tokenizer (its methods do not mutate it).

    eos_ids: ids that end a text; those of the model's generation settings may be more than the tokenizer's own.
    """

    def __init__(self, fast: Any, eos_ids: Sequence[int] = ()) -> None:
        self._fast = fast
        self._backend = fast.backend_tokenizer
        own = () if fast.eos_token_id is None else (int(fast.eos_token_id),)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *eos_ids)))
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens (such as BOS) that the model expects around one."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ending where the assistant is to speak. Raises HeadraceError (400) for one that the
        chat template refuses, or when the model has no template."""
        if not self._fast.chat_template:
            raise invalid("messages", "this model has no chat template: send a prompt instead", code="no_chat_template")
        try:
            text = self._fast.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
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
    """The printable stand-ins that byte-level BPE uses for bytes (Radford et al. 2019, GPT-2's encoder), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of what --model names, with the ids that end its texts. Raises ConfigError, saying why."""
    source = resolve_source(model)
    fast = load_transformers_tokenizer(source)
    if not fast.is_fast:
        raise ConfigError(f"{model}: only fast tokenizers (tokenizer.json, or a GGUF file's) are supported")
    return Tokenizer(fast, eos_token_ids(source))
