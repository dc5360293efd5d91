"""Cache of tokenizers that transformers has converted, so that servers start without importing transformers.

    files of the model ──transformers──► TokenizerRecord in the cache folder ──► every start of a server
                        (child, seconds)                                          (no transformers, no torch)

transformers knows how to read the tokenizers of many models. But importing it takes seconds and hundreds of megabytes
that a front end does not need afterwards.
"""

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec
import xxhash

from headrace.core.runtime.private_folder import private_folder
from headrace.core.runtime.process import die_with_parent, leave_signals_to_parent, module_command
from headrace.core.types.errors import ConfigError
from headrace.engine.model.config_fields import Fields, Kind
from headrace.engine.model.source import ModelSource, eos_token_ids, read_json, resolve_source

log = logging.getLogger(__name__)

FORMAT = 4  # version of the files; those of other versions are not read
UNUSABLE_MODEL = 2  # exit status of a conversion that failed because of the model
NOT_WRITTEN = 3  # exit status of a conversion whose result cannot be written
CHECKSUM_BYTES = 8  # xxh3 of a record, before it
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE: Kind[str | list[dict[str, str]]] = Kind(
    str | list[dict[str, str]], "a text or a list of objects with name and template"
)
TEXT: Kind[str] = Kind(str, "a text")
PROCESSOR_TEMPLATE = "chat_template.json"
SENTENCEPIECE = "tokenizer.model"
TOKENIZER_FILES = ("tokenizer.json", SENTENCEPIECE, "vocab.json")


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


def load_record(source: ModelSource, cache_dir: str) -> TokenizerRecord:
    """The tokenizer of a model, converted now if it is not in cache_dir ("" for no cache). Raises ConfigError for a
    model without a tokenizer that can be used."""
    if source.kind == "hf" and not any((source.path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model folder {source.path} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    with _folder(cache_dir) as folder:
        try:
            return _record_in(folder, source)
        except _NotWritten as error:
            if not cache_dir:
                raise ConfigError(f"the tokenizer cannot be converted: {error}") from error
            log.warning("%s: the tokenizer is converted at every start (--cache-dir)", error)
    return load_record(source, "")


class _NotWritten(Exception):
    """A record cannot be written to its folder; the message names the file and says why."""


def _record_in(folder: Path, source: ModelSource) -> TokenizerRecord:
    """The record of a folder, converted now if it is not there or damaged. Raises ConfigError for a tokenizer that
    cannot be used, _NotWritten."""
    path = folder / f"{_key(source)}.msgpack"
    record = _read(path)
    if record is None:
        log.info("converting the tokenizer of %s to %s", source.path, path)
        _convert_in_child(source, path)
        record = _read(path)
    if record is None:
        raise _NotWritten(f"{path} was written and cannot be read back")
    return record


@contextlib.contextmanager
def _folder(cache_dir: str) -> Iterator[Path]:
    """The folder of records; a temporary one if that cannot be written."""
    if cache_dir:
        folder = Path(cache_dir) / "tokenizers"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            yield folder
            return
        log.warning("%s cannot be written: the tokenizer is converted at every start (--cache-dir)", folder)
    with private_folder() as temporary:
        yield temporary


def _key(source: ModelSource) -> str:
    """Hash of the names, sizes and times of the model's files, and of the versions of the libraries that read them."""
    path = source.path.resolve()
    paths = [path] if path.is_file() else sorted([*path.iterdir(), *path.glob("additional_chat_templates/*")])
    states = [(str(file), stat.st_size, stat.st_mtime_ns) for file in paths if file.is_file() for stat in [file.stat()]]
    about = (FORMAT, version("transformers"), version("tokenizers"), states)
    return hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:32]


def _read(path: Path) -> TokenizerRecord | None:
    """The record of a file; None where there is none, or a damaged one."""
    try:
        stored = path.read_bytes()
        packed = stored[CHECKSUM_BYTES:]
        if stored[:CHECKSUM_BYTES] != xxhash.xxh3_64_digest(packed):
            return None
        return msgspec.msgpack.decode(packed, type=TokenizerRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _convert_in_child(source: ModelSource, path: Path) -> None:
    """Run main() in a child process. Raises ConfigError with its error message, _NotWritten."""
    command = module_command("headrace.engine.model.tokenizer_store", str(os.getpid()), str(source.path), str(path))
    # A session of its own: Ctrl-C in a terminal is for the server.
    child = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},  # all files are here; none that they name elsewhere is fetched
    )
    if child.returncode == NOT_WRITTEN:
        raise _NotWritten(child.stderr.strip().splitlines()[-1])
    if child.returncode:
        said = child.stderr.strip()
        reason = (said.splitlines() or ["no message"])[-1]
        if child.returncode != UNUSABLE_MODEL:
            log.debug("the conversion of a tokenizer ended with status %d: %s", child.returncode, said)
            reason = f"{reason} (status {child.returncode})"
        raise ConfigError(f"no tokenizer could be loaded from {source.path}: {reason}")


def convert(source: ModelSource) -> TokenizerRecord:
    """Convert a model's tokenizer by transformers. Raises ConfigError for one that cannot be used."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds; only the child process does it

    _check_files(source)
    ids = eos_token_ids(source)
    try:
        if source.kind == "gguf":
            # AutoTokenizer would first parse the whole file in Python to learn which class to take.
            fast = PreTrainedTokenizerFast.from_pretrained(source.path.parent, gguf_file=source.path.name)
        else:
            fast = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)
    except Exception as error:  # malformed files raise all kinds of exceptions in transformers and tokenizers
        if "trust_remote_code" in str(error):
            raise ConfigError("it needs code of the model folder (auto_map), which is never run") from error
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    if not fast.is_fast:
        raise ConfigError("only fast tokenizers (tokenizer.json, or a GGUF file's) are supported")
    backend = fast.backend_tokenizer
    backend.no_truncation()  # a prompt that is too long is refused, not cut
    backend.no_padding()
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


def _check_files(source: ModelSource) -> None:
    """Raises ConfigError for files whose mistakes transformers would pass on, or name badly."""
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


def main(parent: str, model: str, path: str) -> int:
    """Convert one tokenizer; returns the exit status. The file is replaced atomically, since other servers may convert
    the same tokenizer at the same time."""
    die_with_parent(int(parent))
    leave_signals_to_parent()
    try:
        record = convert(resolve_source(model))
    except ConfigError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return UNUSABLE_MODEL
    try:
        _write(record, Path(path))
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
        return NOT_WRITTEN
    return 0


def _write(record: TokenizerRecord, path: Path) -> None:
    """Raises OSError, and leaves nothing behind then."""
    packed = msgspec.msgpack.encode(record)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(xxhash.xxh3_64_digest(packed) + packed)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
