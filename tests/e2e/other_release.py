"""A server of another release: all messages that its processes send to peers have more fields, or fewer.

Processes that have the folder of write_hook() in PYTHONPATH are of that release.
"""

from pathlib import Path
from typing import Literal

Release = Literal["earlier", "later"]

# Not in messages of the first release, or without meaning between servers that move KV over TCP and report no reasons.
ADDED_SINCE = (
    "components", "memory", "wait", "prompt_hash", "retry_after_s", "stage", "reason", "renew", "peer_stage",
    "checksum_shm", "nixl", "hidden", "draft_top_k",
)  # fmt: skip

HOOK = f"""
import pathlib
import msgspec
from headrace.core.runtime.codec import Codec
from headrace.transfer.protocol.messages import Message

encode = Codec.encode

def encode_otherwise(codec, message):
    data = encode(codec, message)
    if not isinstance(message, Message):
        return data
    pathlib.Path(__file__).with_name(type(message).__name__).touch()
    body = msgspec.msgpack.decode(data)
    if RELEASE == "later":
        body |= {{"colour": "blue", "shape": [{{"sides": 3}}]}}
    else:
        optional = {{field.encode_name for field in msgspec.structs.fields(message) if not field.required}}
        body = {{key: value for key, value in body.items() if key not in optional.intersection({ADDED_SINCE})}}
    return msgspec.msgpack.encode(body)

Codec.encode = encode_otherwise
"""


def write_hook(folder: Path, release: Release) -> str:
    """Write a module that Python imports when it starts. Returns the folder, in which there is a file for each type of
    message that was sent, later."""
    (folder / "sitecustomize.py").write_text(f"RELEASE = {release!r}\n{HOOK}")
    return str(folder)
