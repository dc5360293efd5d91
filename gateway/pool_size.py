"""Size of a gateway's pool, and the memory that it takes at once."""

from collections.abc import Callable
from typing import TypeVar

from headrace.core.config import GatewayConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.device import available_memory

LONGEST_PROMPTS = 4  # that the pool holds unless --pool-tokens says otherwise
T = TypeVar("T")


def with_pool(
    config: GatewayConfig, geometry: Geometry, longest: int, make: Callable[[int], T], device: str = "cpu"
) -> T:
    """What `make` returns, which takes memory of the device for so many pages. longest: tokens of the longest sequence.
    Raises ConfigError if there is not as much memory."""
    pages = max(1, geometry.pages_for(config.pool_tokens or LONGEST_PROMPTS * longest))
    needed, available = pages * geometry.page_bytes, available_memory(device)
    on, other = ("", "") if device == "cpu" else (f" of {device}", ", or --device cpu")
    size = f"{pages * geometry.page_size} tokens ({needed >> 20} MiB{on})"
    if needed > available:  # all of it is taken at once
        raise ConfigError(
            f"no memory for a pool of {size}: {available >> 20} MiB are available; write a smaller --pool-tokens{other}"
        )
    try:
        return make(pages)
    except OSError as error:
        text = f"no memory for a pool of {size}: {error.strerror}; write a smaller --pool-tokens{other}"
        raise ConfigError(text) from error
