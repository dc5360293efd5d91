"""Records that transformers makes of a model's files, made in a child process and kept in the cache folder.

    files of the model ──transformers──► record in the cache folder ──► every start of a server
                        (child, seconds)                                 (no transformers)

Importing transformers takes seconds and hundreds of megabytes that the readers of such a record do not need.
"""

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import xxhash

from headrace.core.runtime.private_folder import private_folder
from headrace.core.runtime.process import die_with_parent, leave_signals_to_parent, module_command
from headrace.core.types.errors import ConfigError
from headrace.engine.model.gguf_parts import part_paths
from headrace.engine.model.source import ModelSource

log = logging.getLogger(__name__)

UNUSABLE_MODEL = 2  # exit status of a child that failed because of the model
NOT_WRITTEN = 3  # exit status of a child whose result cannot be written
CHECKSUM_BYTES = 8  # xxh3 of a record, before it
R = TypeVar("R", bound=msgspec.Struct)


class NotWritten(Exception):
    """A record cannot be written to its folder; the message names the file and says why."""


class KeptRecords(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """One kind of records."""

    folder: str
    """In the cache folder."""
    version: int
    """Of the records; those of other versions are not read."""
    module: str
    """What the child process runs: its main program calls make()."""
    type: type[R]
    what: str
    """In messages, such as "the tokenizer"."""
    libraries: tuple[str, ...]
    """Packages of another version of which a record may be another."""
    unusable: str = ""
    """Before the reason for which a model cannot be used; {path} is the model's."""

    def load(self, source: ModelSource, cache_dir: str) -> R:
        """The record of a model, made now if it is not in cache_dir ("" for no cache). Raises ConfigError for a model
        of which there is none."""
        with self._folder(cache_dir) as folder:
            try:
                return self._record_in(folder, source)
            except NotWritten as error:
                if not cache_dir:
                    raise ConfigError(f"{self.what} cannot be converted: {error}") from error
                log.warning("%s: %s is converted at every start (--cache-dir)", error, self.what)
        return self.load(source, "")

    def make(self, parent: str, path: str, convert: Callable[[], R]) -> int:
        """In the child: write the record that convert() makes; returns the exit status. The file is replaced
        atomically, since other servers may make the same record at the same time."""
        die_with_parent(int(parent))
        leave_signals_to_parent()
        try:
            record = convert()
        except ConfigError as error:
            print(" ".join(str(error).split()), file=sys.stderr)
            return UNUSABLE_MODEL
        try:
            _write(record, Path(path))
        except OSError as error:
            print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
            return NOT_WRITTEN
        return 0

    def _record_in(self, folder: Path, source: ModelSource) -> R:
        """The record of a folder, made now if it is not there or damaged. Raises ConfigError for a model that cannot be
        used, NotWritten."""
        path = folder / f"{self._key(source)}.msgpack"
        record = self._read(path)
        if record is None:
            log.info("converting %s of %s to %s", self.what, source.path, path)
            self._run_child(source, path)
            record = self._read(path)
        if record is None:
            raise NotWritten(f"{path} was written and cannot be read back")
        return record

    @contextlib.contextmanager
    def _folder(self, cache_dir: str) -> Iterator[Path]:
        """The folder of records; a temporary one if that cannot be written."""
        if cache_dir:
            folder = Path(cache_dir) / self.folder
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                yield folder
                return
            log.warning("%s cannot be written: %s is converted at every start (--cache-dir)", folder, self.what)
        with private_folder() as temporary:
            yield temporary

    def _key(self, source: ModelSource) -> str:
        """Hash of the names, sizes and times of the model's files, and of the versions of the libraries that read
        them."""
        path = source.path
        paths = part_paths(path) if path.is_file() else [*path.iterdir(), *path.glob("additional_chat_templates/*")]
        states = [
            (str(file.resolve()), stat.st_size, stat.st_mtime_ns)
            for file in sorted(paths)
            if file.is_file()
            for stat in [file.stat()]
        ]
        about = (self.version, *map(version, self.libraries), states)
        return hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:32]

    def _read(self, path: Path) -> R | None:
        """The record of a file; None where there is none, or a damaged one."""
        try:
            stored = path.read_bytes()
            packed = stored[CHECKSUM_BYTES:]
            if stored[:CHECKSUM_BYTES] != xxhash.xxh3_64_digest(packed):
                return None
            return msgspec.msgpack.decode(packed, type=self.type)
        except (OSError, msgspec.DecodeError):
            return None

    def _run_child(self, source: ModelSource, path: Path) -> None:
        """Run the module in a child process. Raises ConfigError with its error message, NotWritten."""
        command = module_command(self.module, str(os.getpid()), str(source.path), str(path))
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
            raise NotWritten(child.stderr.strip().splitlines()[-1])
        if child.returncode:
            said = child.stderr.strip()
            reason = (said.splitlines() or ["no message"])[-1]
            if child.returncode != UNUSABLE_MODEL:
                log.debug("converting %s ended with status %d: %s", self.what, child.returncode, said)
                reason = f"{reason} (status {child.returncode})"
            raise ConfigError(f"{self.unusable.format(path=source.path)}{reason}")


def _write(record: msgspec.Struct, path: Path) -> None:
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
