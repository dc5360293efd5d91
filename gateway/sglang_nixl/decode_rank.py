"""Decode ranks: whether the memory that they register fits, and whether the pages that they name do. Pure."""

from collections.abc import Sequence

import msgspec

from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.gateway.sglang_nixl.aux_row import check_buffers
from headrace.gateway.sglang_nixl.wire import Registration, RoomTarget

DRAM, VRAM = "DRAM", "VRAM"


class DecodeRank(msgspec.Struct, frozen=True, kw_only=True):
    """A registered decode rank, and the KV heads that it has."""

    registration: Registration
    first_head: int
    heads: int

    @property
    def memory_kind(self) -> str:
        """NIXL's memory type of its KV buffers: VRAM or DRAM."""
        return self.registration.memory_kinds[0] if self.registration.memory_kinds else VRAM


class RankWrite(msgspec.Struct, frozen=True):
    """One decode rank's part of a room's writes."""

    rank: DecodeRank
    target: RoomTarget


def why_unfit(writes: Sequence[RankWrite], tokens: int, page_size: int) -> str:
    """Why the pages that the decode ranks name cannot be those of a prompt of so many tokens; "" if they can."""
    for write in writes:
        target, pages = write.target, write.rank.registration.pages
        if target.prefix % page_size or target.prefix > tokens:
            return f"the decode engine has {target.prefix} tokens of {tokens}, with pages of {page_size}"
        wanted = ceil_div(tokens, page_size) - target.prefix // page_size
        if len(target.pages) != wanted:
            return (
                f"the decode engine names {len(target.pages)} pages; the prompt's {tokens} tokens after "
                f"{target.prefix} need {wanted} of {page_size}"
            )
        if pages is not None and max(target.pages, default=-1) >= pages:
            return f"page {max(target.pages)} of the decode engine's {pages}"
    prefixes = sorted({write.target.prefix for write in writes})
    return "" if len(prefixes) == 1 else f"the decode ranks have {prefixes} tokens"


def token_bytes(geometry: Geometry) -> int:
    """Bytes of one token in one layer's keys or values, all heads."""
    return geometry.kv_heads * geometry.head_dim * geometry.item_bytes


def fit(registration: Registration, geometry: Geometry) -> DecodeRank:
    """What a rank is to be sent of a pool of this geometry. Raises ValueError, naming both values, if it is none."""
    buffers, ranks = len(registration.kv_addresses), registration.tp_size
    if registration.has_states:
        raise ValueError("the decode engine has state besides keys and values, which is not served")
    if registration.dcp_size != 1:
        raise ValueError(f"decode context parallelism of {registration.dcp_size}; only 1 is served")
    if buffers != 2 * geometry.layers:
        raise ValueError(
            f"{buffers} KV buffers at the decode engine, {2 * geometry.layers} here (keys and values of "
            f"{geometry.layers} layers; draft models are not served)"
        )
    if registration.layer_ids and registration.layer_ids != 2 * tuple(range(geometry.layers)):
        raise ValueError("the decode engine's layers are in another order")
    if not 0 <= registration.tp_rank < ranks or geometry.kv_heads % ranks:
        raise ValueError(f"tp rank {registration.tp_rank} of {ranks} for {geometry.kv_heads} KV heads")
    heads = geometry.kv_heads // ranks
    size = geometry.page_size * token_bytes(geometry) // ranks
    if len(registration.page_bytes) != buffers or set(registration.page_bytes) != {size}:
        theirs = max(registration.page_bytes, key=lambda one: one != size, default=0)
        raise ValueError(
            f"a page has {theirs} bytes in one layer's keys at the decode engine, {size} here (page size "
            f"{geometry.page_size}, {heads} of {geometry.kv_heads} KV heads, {geometry.head_dim} of {geometry.dtype})"
        )
    kinds = set(registration.memory_kinds) or {VRAM}
    if len(kinds) != 1 or not kinds <= {DRAM, VRAM}:
        raise ValueError(f"KV in memory of the kinds {', '.join(sorted(kinds))}; served are {DRAM} or {VRAM}")
    if len(registration.memory_kinds) not in (0, buffers):
        raise ValueError(f"{len(registration.memory_kinds)} memory kinds for {buffers} KV buffers")
    check_buffers(len(registration.aux_addresses))
    return DecodeRank(registration=registration, first_head=registration.tp_rank * heads, heads=heads)
