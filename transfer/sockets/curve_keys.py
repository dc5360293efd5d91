"""CURVE key files: those of zmq.auth and czmq, as `headrace keys` writes them. Reads files, and nothing else.

NAME.key has the public key and may be given to every peer, NAME.key_secret has both. Keys are Z85, 40 characters.
"""

import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.allow_list import AllowedPrefill, address_of, parse_allowed

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

_LINE = re.compile(r'^\s*(public|secret)-key\s*=\s*"(.*)"\s*$', re.MULTILINE)
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(NamedTuple):
    """A CURVE key pair."""

    public: str
    """Z85, 40 characters."""
    secret: str
    """Z85, 40 characters."""


def key_text(public: str, secret: str = "") -> str:
    """The content of a key file: of NAME.key_secret with a secret key, of NAME.key without."""
    kind = "SECRET key pair: only its owner may read it" if secret else "public key"
    pair = f'    public-key = "{public}"\n' + (f'    secret-key = "{secret}"\n' if secret else "")
    return f"# ZeroMQ CURVE {kind}\nmetadata\ncurve\n{pair}"


def read_pair(path: Path) -> KeyPair:
    """Both keys in a key file. Raises ConfigError for a file without both, and for one that every user can read."""
    found = _read(path)
    if "secret" not in found:
        raise ConfigError(f"{path} has no secret key: name the file that ends in {SECRET_SUFFIX}")
    if path.stat().st_mode & stat.S_IROTH:
        raise ConfigError(f"every user of this machine can read the secret key in {path}: chmod o-r it")
    return KeyPair(found["public"], found["secret"])


def read_public(path: Path) -> str:
    """The public key in a key file of either kind. Raises ConfigError if the file cannot be read or has no key."""
    return _read(path)["public"]


def _read(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read the key file {path}: {why}") from error
    found = dict(_LINE.findall(text))
    if "public" not in found or not all(_KEY.fullmatch(key) for key in found.values()):
        raise ConfigError(f"{path} is no CURVE key file; make one with: headrace keys FOLDER")
    return found


class ServerKeys:
    """The public keys of prefill servers.

    Args:
        texts: each FILE, HOST=FILE or HOST:PORT=FILE.
        option: name of the option in error messages.

    Raises ConfigError for a text or a file that cannot be used.
    """

    def __init__(self, texts: Iterable[str], option: str = "--curve-server-key") -> None:
        self._default = ""
        self._rules: list[tuple[AllowedPrefill, str]] = []
        for text in texts:
            host, equals, file = text.partition("=")
            if equals:
                self._rules.append((parse_allowed(host, option), read_public(Path(file))))
            elif self._default:
                raise ConfigError(f"{option} has two files for all servers: write HOST=FILE for some of them")
            else:
                self._default = read_public(Path(text))

    def of(self, url: str) -> str:
        """The key of the server at this URL; "" where none is known. HOST:PORT=FILE goes before HOST=FILE, that before
        FILE."""
        host, port = address_of(url)
        found = [(rule.port, key) for rule, key in self._rules if rule.matches(host, port)]
        return max(found, default=(0, self._default))[1]


def known_servers(curve_key: str, curve_server_keys: Sequence[str]) -> ServerKeys | None:
    """The server keys of a peer that is configured by two options; None without either: connections in the clear.

    Args:
        curve_key: file with the peer's own keys.
        curve_server_keys: as the texts of ServerKeys.

    Raises ConfigError for key files that cannot be used, and for one option without the other.
    """
    if bool(curve_key) != bool(curve_server_keys):
        raise ConfigError("curve_key and curve_server_keys go together: give both, or neither")
    if not curve_key:
        return None
    read_pair(Path(curve_key))
    return ServerKeys(curve_server_keys, "curve_server_keys")


class AllowList:
    """The public keys in a folder's *.key files.

    The folder is read again at each handshake after it has changed, so keys that are added or removed count from the
    next connection on. Raises ConfigError when there is no such folder, or a file in it has no key.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder} of public keys; make it, with {PUBLIC_SUFFIX} files in it")
        self._names = {read_public(path): path.stem for path in self._files()}
        self._stamp: tuple[tuple[str, int, int], ...] | None = self._look()

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, public: str) -> str | None:
        """The name of the file with this key; None when it is not allowed. A file that cannot be read
        allows no key."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            self._names = {}
            for path in self._files():
                try:
                    self._names[read_public(path)] = path.stem
                except ConfigError:
                    self._stamp = None  # read again next time: this process may have had no free descriptor
        return self._names.get(public)

    def _files(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == PUBLIC_SUFFIX)
        except OSError:
            return []

    def _look(self) -> tuple[tuple[str, int, int], ...]:
        """Name, time of change (ns) and size of each file: differs once one was added, removed or changed."""
        seen = []
        for path in self._files():
            try:
                about = path.stat()
            except OSError:
                continue
            seen.append((path.name, about.st_mtime_ns, about.st_size))
        return tuple(seen)
