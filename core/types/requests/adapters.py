"""LoRA adapters as a server names them, and what their requests do not share with others."""

import re
from collections.abc import Sequence

from headrace.core.types.errors import ConfigError

MAX_ADAPTERS = 256
MAX_SALT_CHARS = 256
"""Of a salt that a client may send."""

BEYOND_CLIENTS = "\0" * (MAX_SALT_CHARS + 1)
"""How salts begin that no client can send: it would be too long."""
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def adapter_folders(given: Sequence[str]) -> dict[str, str]:
    """Folders of adapters by name, from NAME=FOLDER. Raises ConfigError for anything else, for a name that comes twice,
    and for too many."""
    folders: dict[str, str] = {}
    for each in given:
        name, separator, folder = each.partition("=")
        if not separator or not folder or not _NAME.fullmatch(name):
            raise ConfigError(
                f"--lora {each[:200]!r}: write NAME=FOLDER, with a name of 1 to 128 printable characters without spaces"
            )
        if name in folders:
            raise ConfigError(f"--lora {name}=…: another adapter has this name")
        folders[name] = folder
    if len(folders) > MAX_ADAPTERS:
        raise ConfigError(f"--lora: {len(folders)} adapters; at most {MAX_ADAPTERS} are held")
    return folders


def adapter_salt(adapter: str, salt: str) -> str:
    """The salt of the prefix cache for requests with this salt that go through an adapter: no other adapter has it, nor
    has the model itself, whose requests have the salt as it is. adapter: its fingerprint, "" for none."""
    return f"{BEYOND_CLIENTS}{adapter}{salt}" if adapter else salt


def adapter_mismatch(*, prefill: str, decode: str) -> str:
    """The sentence about a prompt whose adapter is not the same on both servers: fingerprints, "" for none."""
    return f"the prefill server computes the prompt with {_called(prefill)}, the decode server with {_called(decode)}"


def _called(adapter: str) -> str:
    return f"adapter {adapter}" if adapter else "no adapter"
