"""Byte fallback of SentencePiece-like tokenizers (Llama 2, Mistral, Gemma): characters outside the vocabulary are
tokens of single bytes, such as <0xE6>. Pure.

The tokenizers library decodes a run of such tokens only as a whole: unless it is UTF-8 from its first to its last byte,
each byte becomes U+FFFD, and whole characters are lost with it. The text so far would change with tokens that follow,
and one that is cut within a character would lose what is before it. Here whole characters stay, as in SentencePiece;
what is none becomes U+FFFD as by any decoder of UTF-8, and as in byte-level tokenizers.
"""

from collections.abc import Iterable, Mapping

import msgspec
from tokenizers import decoders

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
BYTE_OF: Mapping[str, int] = {name: byte for byte, name in enumerate(BYTE_TOKENS)}


def decodes_byte_tokens(decoder: decoders.Decoder | None) -> bool:
    """Whether a decoder of the tokenizers library turns byte tokens into bytes."""
    if decoder is None:
        return False
    part = msgspec.json.decode(decoder.__getstate__())
    return any(each["type"] == "ByteFallback" for each in part.get("decoders", [part]))


def with_whole_characters(names: Iterable[str]) -> list[str]:
    """Names of tokens, in which those of bytes that are no whole character are U+FFFD: one for each maximal part, as
    Unicode recommends (chapter 3, "U+FFFD Substitution of Maximal Subparts")."""
    result: list[str] = []
    run = bytearray()
    for name in names:
        byte = BYTE_OF.get(name)
        if byte is not None:
            run.append(byte)
            continue
        result += _characters(run)
        run.clear()
        result.append(name)
    return result + _characters(run)


def _characters(run: bytearray) -> list[str]:
    text = run.decode(errors="replace")
    if REPLACEMENT not in text:
        return [BYTE_TOKENS[byte] for byte in run]
    return [
        name
        for character in text
        for name in ([REPLACEMENT] if character == REPLACEMENT else [BYTE_TOKENS[byte] for byte in character.encode()])
    ]
