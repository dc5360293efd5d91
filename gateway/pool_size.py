"""Size of a gateway's pool, and the memory that it takes at once."""

from collections.abc import Callable
from typing import TypeVar

from headrace.core.config import GatewayConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.device import available_memory

LONGEST_PROMPTS = 4  # that the pool holds unless --pool-tokens says otherwise
T = TypeVar("T")


def with_pool(config: GatewayConfig, geometry: Geometry, longest: int, make: Callable[[int], T]) -> T:
    """What `make` returns, which takes memory for so many pages. longest: tokens of the longest sequence. Raises
    ConfigError if there is not as much memory."""
    pages = max(1, geometry.pages_for(config.pool_tokens or LONGEST_PROMPTS * longest))
    needed, available = pages * geometry.page_bytes, available_memory("cpu")
    size = f"{pages * geometry.page_size} tokens ({needed >> 20} MiB)"
    if needed > available:  # all of it is taken at once
        raise ConfigError(
            f"no memory for a pool of {size}: {available >> 20} MiB are available; write a smaller --pool-tokens"
        )
    try:
        return make(pages)
    except OSError as error:
        raise ConfigError(f"no memory for a pool of {size}: {error.strerror}; write a smaller --pool-tokens") from error
