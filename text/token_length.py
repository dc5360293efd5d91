"""How few tokens a text can have, told by its length alone: what certainly cannot fit need not be tokenized. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.core.types.kv.geometry import ceil_div
from headrace.text.byte_fallback import BYTE_TOKENS

# Of a UTF-8 text, by Unicode's normal forms and case folding: mathematical letters of four bytes become ASCII.
UNICODE_SHRINKAGE = 4
_SLICE = 1 << 16  # characters in one step; other threads get their turn between two of them
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
_SPLITTERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")

Part = Mapping[str, Any]  # of a tokenizer's JSON


class TokenBound(NamedTuple):
    """Lower bound of the number of tokens of a text, by its length."""

    longest: int
    """Most bytes of a text that one token stands for."""
    dropped: bytes = b""
    """Bytes that may become no token at all."""

    def least_tokens(self, text: str) -> int:
        """Number of tokens that the text has at least."""
        if text.isascii() and not self.dropped:
            return ceil_div(len(text), self.longest)
        parts = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
        return ceil_div(sum(len(part.encode().translate(None, self.dropped)) for part in parts), self.longest)


def length_bound(tokenizer: str, byte_characters: Mapping[str, int]) -> TokenBound | None:
    """The bound for a tokenizer; None if there is none, such as where runs of spaces are dropped, or any number of
    unknown characters becomes one token.

    tokenizer: as the tokenizers library writes it (JSON). byte_characters: how byte-level BPE writes the 256 bytes.
    """
    given: Part = msgspec.json.decode(tokenizer)
    model, splitter, added = given["model"], given.get("pre_tokenizer"), given.get("added_tokens") or []
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    shrinkage = _shrinkage(given.get("normalizer"))
    if shrinkage is None or not _keeps_all(splitter):
        return None
    vocab: Mapping[str, int] = model["vocab"]
    length: Callable[[str], int] = len  # a character for each byte
    dropped = b""
    if _is_byte_level(splitter):
        dropped = bytes(byte for character, byte in byte_characters.items() if character not in vocab)
        if dropped and given.get("normalizer") is not None:
            return None  # it may make them of others
    elif model.get("byte_fallback") and all(byte in vocab for byte in BYTE_TOKENS):
        length = _utf8_length
    else:
        return None
    longest = max(map(length, vocab))
    return TokenBound(shrinkage * max([longest, *(_utf8_length(token["content"]) for token in added)]), dropped)


def _utf8_length(text: str) -> int:
    return len(text.encode())


def _parts(part: Part | None, inside: str) -> Iterable[Part]:
    """The members of a sequence, or the part itself."""
    if part is None:
        return ()
    return part[inside] if part["type"] == "Sequence" else (part,)


def _shrinkage(normalizer: Part | None) -> int | None:
    """By how much a normalizer can shorten a text at most; None for without limit, and for those not known here."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        match part:
            case {"type": "Prepend" | "ByteLevel"}:
                pass
            case {"type": kind} if kind in _UNICODE_FORMS:
                factor *= UNICODE_SHRINKAGE
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
                factor *= math.ceil(max(1.0, _utf8_length(pattern) / _utf8_length(content)))
            case _:
                return None
    return factor


def _keeps_all(splitter: Part | None) -> bool:
    """Whether a pre-tokenizer drops nothing, such as the spaces between words."""
    return all(
        part["type"] in _SPLITTERS or (part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed")
        for part in _parts(splitter, "pretokenizers")
    )


def _is_byte_level(splitter: Part | None) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(splitter, "pretokenizers"))
