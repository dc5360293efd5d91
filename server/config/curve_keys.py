"""CURVE keys: `headrace keys` writes a pair, and a server checks all key files before it starts."""

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
    """Add the flags of `headrace keys`."""
    parser.add_argument("folder", type=Path, help="where to write NAME.key and NAME.key_secret; created if missing")
    parser.add_argument(
        "--name", default="headrace", help="name of the pair and of the peer in logs (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a pair of this name")


def main(given: argparse.Namespace) -> int:
    """Write a pair and print the paths. Returns the exit status. Raises ConfigError as write_pair()."""
    public, secret = write_pair(given.folder, given.name, force=given.force)
    print(f"{public}  public key: for the other side, --curve-server-key or a file in its --curve-allowed folder")
    print(f"{secret}  both keys: for this server's --curve-key; keep it secret")
    return 0


def write_pair(folder: Path, name: str, *, force: bool = False) -> tuple[Path, Path]:
    """Write a new pair to NAME.key and NAME.key_secret, the latter readable by its owner only. Returns both paths.

    Raises ConfigError when one of them exists (unless force), or cannot be written.
    """
    _require_curve()
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"--name {name!r} cannot be the name of a file")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    paths = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    for path in paths:
        if path.exists() and not force:
            raise ConfigError(f"{path} exists already: choose another --name, or overwrite it with --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths[1], key_text(public, secret), 0o600)
        _write(paths[0], key_text(public), 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error.strerror}") from error
    return paths


def _write(path: Path, text: str, mode: int) -> None:
    """Write a new file with this mode, then rename it: the secret is never readable for others, not even briefly, and
    a process that has the old file open does not see the new keys."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)  # regardless of the umask
        file.write(text)
    new.replace(path)


def check_keys(config: Config) -> None:
    """Raises ConfigError when a key file of the configuration is missing or malformed, or a prefill server has none."""
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
        raise ConfigError("the installed libzmq was built without CURVE; install the pyzmq wheel, which has it")
