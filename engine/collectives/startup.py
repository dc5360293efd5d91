"""What the ranks of a group compare when they start."""

import torch
import xxhash

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.base import Collectives

ROWS = 64  # of the tensor that is summed


def check_equal_sums(group: Collectives, size: int, dtype: torch.dtype, device: str) -> None:
    """Sum a tensor [ROWS, size] over the group and compare a digest of the result.

    Ranks choose experts and samples by hidden states that are sums, so the sums have to be equal to the bit. Raises
    ConfigError on all ranks when they are not, LinkBroken when a rank is gone.
    """
    if group.size == 1:
        return
    generator = torch.Generator().manual_seed(group.rank)
    mine = torch.randn(ROWS, size, generator=generator).to(dtype=dtype, device=device)
    summed = group.all_reduce(mine).wait()
    digest = xxhash.xxh3_64_intdigest(summed.cpu().view(torch.uint8).numpy().tobytes())
    digests = _gathered(group, digest >> 1, device)  # 63 bits, for int64
    if len(set(digests)) > 1:
        shown = ", ".join(f"{each:x}" for each in digests)
        raise ConfigError(
            f"the {group.size} shards have different sums after one all-reduce (digests {shown}), so they would not "
            f"compute the same model; write --tp 1, or run all shards on the same kind of device with one version of "
            f"torch"
        )


def least(group: Collectives, value: int, device: str) -> int:
    """The least of the numbers that the ranks give, on all of them. Raises LinkBroken when a rank is gone."""
    return value if group.size == 1 else min(_gathered(group, value, device))


def _gathered(group: Collectives, value: int, device: str) -> list[int]:
    """The numbers of all ranks: a sum to which each gives its own, in its place."""
    values = torch.zeros(group.size, dtype=torch.int64, device=device)
    values[group.rank] = value
    return [int(each) for each in group.all_reduce(values).wait().tolist()]
