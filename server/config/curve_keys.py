"""CURVE keys: `headrace keys`, and whether all files are there before anything starts."""

import argparse
import os
from pathlib import Path

import zmq

from headrace.core.config import Config
from headrace.core.types.errors import ConfigError
from headrace.transfer.sockets.curve_keys import (
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    AllowList,
    ServerKeys,
    key_text,
    read_pair,
)

DESCRIPTION = "write a new pair of CURVE keys, for --curve-key, --curve-server-key and --curve-allowed"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `headrace keys`."""
    parser.add_argument("folder", type=Path, help="where to write NAME.key and NAME.key_secret; made if need be")
    parser.add_argument("--name", default="headrace", help="of the pair, and of a peer in logs (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write over a pair of this name")


def main(given: argparse.Namespace) -> int:
    """Write a pair and say where. Raises ConfigError."""
    public, secret = write_pair(given.folder, given.name, force=given.force)
    print(f"{public}  public key: for the other side, --curve-server-key or a file in its --curve-allowed folder")
    print(f"{secret}  both keys: for this server's --curve-key; let nobody else read it")
    return 0


def write_pair(folder: Path, name: str, *, force: bool = False) -> tuple[Path, Path]:
    """Make keys and write them to NAME.key and NAME.key_secret, the latter readable by its owner only. Returns the two
    paths. Raises ConfigError when one of them is there and force is not given."""
    _require_curve()
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"--name {name!r} is no name for a file")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    paths = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    for path in paths:
        if path.exists() and not force:
            raise ConfigError(f"{path} is there already: choose another --name, or write over it with --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths[1], key_text(public, secret), 0o600)
        _write(paths[0], key_text(public), 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error.strerror}") from error
    return paths


def _write(path: Path, text: str, mode: int) -> None:
    """As a new file of this mode that takes the name's place: whoever has the old one open does not see the new keys,
    and at no moment can anybody read a secret who must not."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)  # whatever the umask is
        file.write(text)
    new.replace(path)


def check_keys(config: Config) -> None:
    """Raises ConfigError when a key file that the configuration names is not there or is none."""
    transfer, server = config.transfer, config.server
    if not transfer.curve_key:
        return
    _require_curve()
    read_pair(Path(transfer.curve_key))
    if transfer.curve_allowed:
        AllowList(Path(transfer.curve_allowed))
    keys = ServerKeys(server.curve_server_keys)
    for url in server.prefill:
        if not keys.of(url):
            raise ConfigError(f"no --curve-server-key is for {url}: add HOST=FILE, or a FILE for all servers")


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("the installed libzmq has no CURVE; install the pyzmq wheel, which has")
