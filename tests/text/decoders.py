"""Tokenizers with every kind of decoder, over vocabularies in which characters are cut in every way."""

from collections.abc import Callable, Iterable

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from headrace.engine.model.byte_level import byte_level_alphabet
from headrace.text.byte_fallback import BYTE_TOKENS
from headrace.text.tokenizer import Tokenizer

CHARACTERS = "é日本🤗\N{REPLACEMENT CHARACTER}"
WORDS = ("▁", "▁the", "▁▁", "a", "ing", "▁日", "語", "\N{REPLACEMENT CHARACTER}")


def _made(backend: RustTokenizer, decoder: decoders.Decoder | None) -> Tokenizer:
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend, (backend.token_to_id("</s>"),))


def _vocabulary(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def byte_level() -> Tokenizer:
    """Every byte, and tokens that begin and end within characters."""
    alphabet = byte_level_alphabet()
    parts = [
        b"\xa5\xe6\x97",
        b"\x9f\xf0",
        b"\xf0\x9f",
        b"\x97\xa5",
        b"\xed\xa0",
        b"\x80\x80",
        b"the",
        b" a",
        "日".encode(),
    ]
    names = [*alphabet, *("".join(alphabet[byte] for byte in part) for part in parts)]
    return _made(RustTokenizer(models.BPE(vocab=_vocabulary(names), merges=[])), decoders.ByteLevel())


def byte_fallback(*, strip: bool) -> Tokenizer:
    """As of Llama 2 (strip) or Gemma."""
    model = models.BPE(
        vocab=_vocabulary(["<unk>", *BYTE_TOKENS, *WORDS]), merges=[], byte_fallback=True, unk_token="<unk>"
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made = RustTokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strip else "never", split=False)
    return _made(made, decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * strip]))


def unigram(*, fallback: bool) -> Tokenizer:
    """As of T5, and with byte tokens as SentencePiece has them."""
    scores = [("<unk>", 0.0), *((name, -1.0) for name in (*(BYTE_TOKENS if fallback else ()), *WORDS))]
    metaspace = decoders.Metaspace()
    steps = decoders.Sequence([decoders.ByteFallback(), metaspace]) if fallback else metaspace
    return _made(RustTokenizer(models.Unigram(scores, 0, fallback)), steps)


def word_piece(*, cleanup: bool) -> Tokenizer:
    """As of BERT."""
    names = [
        "[UNK]",
        "the",
        "##ing",
        "##s",
        "a",
        ".",
        "'",
        "n't",
        "##日",
        "##\N{REPLACEMENT CHARACTER}",
        "\N{REPLACEMENT CHARACTER}",
    ]
    model = models.WordPiece(vocab=_vocabulary(names), unk_token="[UNK]")
    return _made(RustTokenizer(model), decoders.WordPiece(cleanup=cleanup))


def suffixed() -> Tokenizer:
    """As of GPT-1: words end in </w>."""
    model = models.BPE(vocab=_vocabulary(["a</w>", "the", "ing</w>", "日", "</w>"]), merges=[])
    return _made(RustTokenizer(model), decoders.BPEDecoder())


def words() -> Tokenizer:
    """Without a decoder: tokens are joined by spaces."""
    return _made(
        RustTokenizer(models.WordLevel(_vocabulary(["a", "the", "日", "\N{REPLACEMENT CHARACTER}"]), "a")), None
    )


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte fallback": lambda: byte_fallback(strip=False),
    "byte fallback, strip": lambda: byte_fallback(strip=True),
    "unigram": lambda: unigram(fallback=False),
    "unigram, byte fallback": lambda: unigram(fallback=True),
    "word pieces": lambda: word_piece(cleanup=False),
    "word pieces, cleaned": lambda: word_piece(cleanup=True),
    "suffixes": suffixed,
    "words": words,
}
