"""Cache of tokenizers that transformers has converted, so that servers start without importing transformers.

    files of the model ──transformers──► TokenizerRecord in the cache folder ──► every start of a server
                        (child, seconds)                                          (no transformers, no torch)

transformers knows how to read the tokenizers of many models. But importing it takes seconds and hundreds of megabytes
that a front end does not need afterwards.
"""

import sys
from importlib.util import find_spec

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config_fields import NAME, Fields, Kind
from headrace.engine.model.gguf_file import GgufFile
from headrace.engine.model.gguf_splits import set_split
from headrace.engine.model.kept_records import KeptRecords
from headrace.engine.model.source import ModelSource, eos_token_ids, read_json, resolve_source

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE: Kind[str | list[dict[str, str]]] = Kind(
    str | list[dict[str, str]], "a text or a list of objects with name and template"
)
TEXT: Kind[str] = Kind(str, "a text")
PROCESSOR_TEMPLATE = "chat_template.json"
SENTENCEPIECE = "tokenizer.model"
UNCOMMON = "a\U0010fffd"  # a character that no vocabulary has: an unknown token, or bytes
TEKKEN = "tekken.json"  # of Mistral
TOKENIZER_FILES = ("tokenizer.json", SENTENCEPIECE, "vocab.json", TEKKEN)


class TokenizerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One converted tokenizer."""

    backend: str
    """JSON that the tokenizers library reads."""
    eos_ids: tuple[int, ...]
    """Token ids that end a text."""
    chat_template: str | None
    """Jinja source; None for a model without one."""
    tool_template: str | None = None
    """Source of another template for conversations with tools ("tool_use"); None: there is none."""
    special_tokens: dict[str, str]
    """By the names that chat templates use."""


RECORDS = KeptRecords(
    folder="tokenizers",
    version=5,
    module="headrace.engine.model.tokenizer_store",
    type=TokenizerRecord,
    what="the tokenizer",
    libraries=("transformers", "tokenizers"),
    unusable="no tokenizer could be loaded from {path}: ",
)


def load_record(source: ModelSource, cache_dir: str) -> TokenizerRecord:
    """The tokenizer of a model, converted now if it is not in cache_dir ("" for no cache). Raises ConfigError for a
    model without a tokenizer that can be used."""
    if source.kind == "hf" and not any((source.path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model folder {source.path} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    return RECORDS.load(source, cache_dir)


def convert(source: ModelSource) -> TokenizerRecord:
    """Convert a model's tokenizer by transformers. Raises ConfigError for one that cannot be used."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds; only the child process does it
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    there = _check_files(source)
    ids = eos_token_ids(source)
    try:
        if source.kind == "gguf":
            # AutoTokenizer would first parse the whole file in Python to learn which class to take.
            fast = PreTrainedTokenizerFast.from_pretrained(source.path.parent, gguf_file=source.path.name)
        elif there == [TEKKEN]:
            fast = convert_tekken_tokenizer(str(source.path / TEKKEN))
        else:
            # Not by mistral-common, which is taken where it is installed.
            fast = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False, mistral_format=False)
    except ImportError as error:
        raise ConfigError(f"its only tokenizer takes a package to read: {str(error).strip()}") from error
    except Exception as error:  # malformed files raise all kinds of exceptions in transformers and tokenizers
        if "trust_remote_code" in str(error):
            raise ConfigError("it needs code of the model folder (auto_map), which is never run") from error
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    if not fast.is_fast:
        raise ConfigError("only fast tokenizers (tokenizer.json, or a GGUF file's) are supported")
    backend = fast.backend_tokenizer
    if source.kind == "gguf":
        said = Fields(source.path.name, GgufFile(source.path).metadata)
        set_split(backend, said.get("tokenizer.ggml.model", NAME), said.get("tokenizer.ggml.pre", NAME, "default"))
    backend.no_truncation()  # a prompt that is too long is refused, not cut
    backend.no_padding()
    try:
        backend.encode(UNCOMMON)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"it cannot encode every text: {error}") from error
    template = fast.chat_template or _processor_template(source)
    own = () if fast.eos_token_id is None else (int(fast.eos_token_id),)
    return TokenizerRecord(
        backend=backend.to_str(),
        eos_ids=tuple(dict.fromkeys((*own, *ids))),
        chat_template=template.get("default") if isinstance(template, dict) else template,
        tool_template=template.get("tool_use") if isinstance(template, dict) else None,
        special_tokens=dict(fast.special_tokens_map),
    )


def _processor_template(source: ModelSource) -> str | None:
    """The chat template that older folders of models with images keep with their processor."""
    path = source.path / PROCESSOR_TEMPLATE
    if source.kind != "hf" or not path.is_file():
        return None
    return Fields(PROCESSOR_TEMPLATE, read_json(path)).optional("chat_template", TEXT)


def _check_files(source: ModelSource) -> list[str]:
    """The files of a folder that have its tokenizer. Raises ConfigError for mistakes in files that transformers would
    pass on, or name badly."""
    there = [name for name in TOKENIZER_FILES if source.kind == "hf" and (source.path / name).is_file()]
    if there == [SENTENCEPIECE]:
        with (source.path / SENTENCEPIECE).open("rb") as file:
            needs = file.read(1) == b"\n" and find_spec("sentencepiece") is None  # a file of tiktoken is text
        if needs:
            raise ConfigError(
                f"its only tokenizer is {SENTENCEPIECE}, which takes a package to read: pip install sentencepiece"
            )
    for name in ("tokenizer.json", TOKENIZER_CONFIG):
        if source.kind == "hf" and (source.path / name).is_file():
            fields = Fields(name, read_json(source.path / name))
            if name == TOKENIZER_CONFIG:
                fields.get("chat_template", TEMPLATE, "")
    return there


def main(parent: str, model: str, path: str) -> int:
    """Convert one tokenizer; returns the exit status."""
    return RECORDS.make(parent, path, lambda: convert(resolve_source(model)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
