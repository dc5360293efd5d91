"""What becomes of the pages of the prefix cache, told to routers; the structs are those of vLLM 0.32 on the wire.

In a batch, which is an array, each event is a map with its name under "type". The scheduler emits the events as
effects; server/telemetry/kv_event_publisher.py sends them.
"""

from typing import Literal

import msgspec

Medium = Literal["GPU", "CPU", "DISK"]
Hash = int  # 64 bits, unsigned; scheduler/kv/cache_events.py says of what


class KvEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the events. Fields that vLLM always writes are written here, too, None among them."""


class BlockStored(KvEvent, frozen=True, kw_only=True):
    """Consecutive pages of one prefix are in the cache from now on.

    parent_block_hash: the page before the first one, None at the beginning of a prompt. token_ids: those of all
    these pages, block_size for each; empty for copies in other tiers. medium "GPU" is the pool that forward passes
    read, whatever the device is, "CPU" the host tier, "DISK" the disk tier.
    """

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: Medium = "GPU"
    lora_name: str | None = None


class BlockRemoved(KvEvent, frozen=True, kw_only=True):
    """These pages were evicted, each after all pages that followed it."""

    block_hashes: tuple[Hash, ...]
    medium: Medium = "GPU"


class AllBlocksCleared(KvEvent, frozen=True, kw_only=True):
    """Nothing is in the cache: it is new, or its engine is gone."""


KvEventMessage = BlockStored | BlockRemoved | AllBlocksCleared


class ReplicaKvEvent(KvEvent, frozen=True, kw_only=True):
    """An event of another data-parallel replica than the first, inside the scheduler process."""

    replica: int
    event: KvEventMessage


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """[ts, events, data_parallel_rank]. ts: seconds since 1970."""

    ts: float
    events: tuple[KvEventMessage, ...]
    data_parallel_rank: int = 0
