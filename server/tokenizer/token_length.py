"""How few tokens a text can have, told by its length alone: what certainly cannot fit need not be tokenized. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

# Of a UTF-8 text, by Unicode's normal forms and case folding: mathematical letters of four bytes become ASCII.
UNICODE_SHRINKAGE = 4
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
_SPLITTERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))

Part = Mapping[str, Any]  # of a tokenizer's JSON


def most_bytes_per_token(tokenizer: str, byte_characters: Iterable[str]) -> int | None:
    """The most bytes of a text that one token can stand for. None where there is no such number: parts of a text are
    dropped (runs of spaces, say), or unknown characters become one token however many there are.

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
    length: Callable[[str], int]
    if _is_byte_level(splitter) and all(character in vocab for character in byte_characters):
        length = len  # a character for each byte
    elif model.get("byte_fallback") and all(byte in vocab for byte in _BYTES):
        length = _utf8_length
    else:
        return None
    longest = max(map(length, vocab))
    return shrinkage * max([longest, *(_utf8_length(token["content"]) for token in added)])


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
