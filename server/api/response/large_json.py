"""Large parts of responses: made and encoded beside the event loop, bit by bit, so that others are served meanwhile.

Logprobs of a prompt of 60,000 tokens are 15 MB of JSON, which takes seconds to put together.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

LARGE = 256  # positions whose logprobs are put together on the event loop; more take a thread
PART = 64  # items of a list that are encoded at once; the event loop gets its turn between two parts


async def made_aside(make: Callable[[], dict[str, Any]], positions: int) -> dict[str, Any]:
    """What make returns; its long lists are JSON already if it is about many positions. make may run in a thread. A
    response may have thousands of small choices: others get their turn before each."""
    if positions <= LARGE:
        await asyncio.sleep(0)
        return make()
    return await asyncio.to_thread(lambda: {key: encode_lists(value) for key, value in make().items()})


def encode_lists(value: Any) -> Any:
    """The value with JSON in the place of its long lists, which are used up, those within its objects and short lists
    included."""
    if isinstance(value, dict):
        return {key: encode_lists(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= PART:
        return [encode_lists(each) for each in value]
    return msgspec.Raw(b"[" + b",".join(_encoded(value)) + b"]")


def _encoded(items: list[Any]) -> Iterator[bytes]:
    """The JSON of some items at a time. They leave the list, since millions of objects take long to free at once."""
    for at in range(0, len(items), PART):
        part = items[at : at + PART]
        items[at : at + PART] = (None,) * len(part)
        yield msgspec.json.encode(part)[1:-1]
