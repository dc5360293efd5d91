"""Large parts of responses: made and encoded beside the event loop, bit by bit, so that others are served meanwhile.

Logprobs of a prompt of 60,000 tokens are 15 MB of JSON, which takes seconds to put together.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
LARGE = 256  # positions whose logprobs are put together on the event loop; more take a thread
PART = 64  # items of a list that are encoded at once; the event loop gets its turn between two parts


async def made_aside(make: Callable[[], T], positions: int) -> T:
    """What make returns; its long lists are JSON already if it is about many positions. make may run in a thread. A
    response may have thousands of small choices: others get their turn before each."""
    if positions <= LARGE:
        await asyncio.sleep(0)
        return make()
    return await asyncio.to_thread(lambda: _encoded(make))


def _encoded(make: Callable[[], T]) -> T:
    made: T = encode_lists(make())
    return made


def encode_lists(value: Any) -> Any:
    """The value with JSON in the place of its long lists, those within its objects and short lists included."""
    if isinstance(value, msgspec.Struct):
        return type(value)(**encode_lists(msgspec.structs.asdict(value)))
    if isinstance(value, dict):
        return {key: encode_lists(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= PART:
        return [encode_lists(each) for each in value]
    parts = (msgspec.json.encode(value[at : at + PART])[1:-1] for at in range(0, len(value), PART))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
