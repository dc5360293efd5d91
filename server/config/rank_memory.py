"""Memory of the local ranks of a server, and in words what each rank holds of the model."""

from collections.abc import Sequence

from headrace.core.types.kv.geometry import ITEM_BYTES
from headrace.core.types.ranks.layout import Layout, Place
from headrace.engine.device import available_memory, own_device
from headrace.engine.kv.memory_plan import MemoryPlan, add_host_tier, weight_count
from headrace.engine.load_plan import ModelTerms
from headrace.engine.model.expert_plan import ExpertPlan
from headrace.engine.model.sharding import RankPart, Shard, part_of
from headrace.engine.parallel.layer_split import ranges


def plan_ranks(
    terms: ModelTerms,
    layout: Layout,
    layers: Sequence[int],
    shards: Sequence[Shard],
    experts: ExpertPlan | None = None,
    *,
    kv_pages: int,
    host_pages: int,
    memory_bytes: int = 0,
) -> tuple[MemoryPlan, ...]:
    """The memory plan of each rank, all with the same pages.

    layers: of each stage. experts: None where each rank holds all of its layers' experts. kv_pages, host_pages: as
    configured. memory_bytes: what every device has, and the host; 0: what is free here. Raises ConfigError when
    something does not fit.
    """
    device = terms.computation.device
    parts = [_part_of(terms, place, layers, shards, experts) for place in map(layout.place, layout.ranks)]
    if device != "cpu" and len(parts) > 1:
        rooms = [memory_bytes] * len(parts) if memory_bytes else _rooms(device, layout)
        planned = [terms.plan(part, kv_pages, room) for part, room in zip(parts, rooms, strict=True)]
        pages = min(each.memory.kv_pages for each in planned)
        host_room = memory_bytes or available_memory("cpu")
    else:
        # Ranks share the machine's memory, so the plan of the whole model decides how many pages fit. Each shard that
        # does not offer its KV heads, or its latents, holds what another one has too.
        copies = len(shards) / sum(len(shard.offered) > 0 for shard in shards)
        available = (memory_bytes or available_memory(device)) // (layout.dp if device == "cpu" else 1)
        whole_model = part_of(
            terms.spec,
            experts=experts.held_by_replica if experts is not None else None,
            exchange_bytes=experts.exchange_bytes * layout.pp * layout.tp if experts is not None else 0,
        )
        # Weights that several ranks hold: tied embeddings of stages, what shards do not divide.
        twice = max(0, sum(map(weight_count, parts[: len(parts) // layout.dp])) - weight_count(whole_model))
        available -= twice * ITEM_BYTES[terms.computation.dtype]
        whole = terms.plan(whole_model, kv_pages, available, kv_copies=copies).memory
        pages, rooms = whole.kv_pages, [available] * len(parts)
        used = whole.weight_bytes + int(whole.kv_bytes * copies)
        host_room = (available - used) * layout.dp if device == "cpu" else memory_bytes or available_memory("cpu")
        if len(parts) == 1:
            return (add_host_tier(whole, host_pages, host_room),)
    plans = [terms.plan(part, pages, room).memory for part, room in zip(parts, rooms, strict=True)]
    total = sum(each.page_bytes for each in plans) or 1  # pages of a model with nothing but states are empty
    return tuple(add_host_tier(each, host_pages, host_room * each.page_bytes // total) for each in plans)


def _rooms(device: str, layout: Layout) -> list[int]:
    """Bytes that each rank may allocate on its GPU; those that share one have equal parts."""
    devices = [own_device(device, rank) for rank in layout.ranks]
    return [available_memory(each) // devices.count(each) for each in devices]


def _part_of(
    terms: ModelTerms, place: Place, layers: Sequence[int], shards: Sequence[Shard], experts: ExpertPlan | None
) -> RankPart:
    return part_of(
        terms.spec,
        ranges(layers)[place.stage],
        shards[place.shard],
        len(experts.own(place)) if experts is not None else None,
        experts.exchange_bytes if experts is not None else 0,
    )


def rank_parts(
    layout: Layout, layers: Sequence[int], shards: Sequence[Shard], experts: ExpertPlan | None = None
) -> tuple[str, ...]:
    """What each rank holds of the model; nothing for a single one that has all. experts: as for plan_ranks()."""
    if len(layout.ranks) == 1 and (experts is None or experts.dp == 1):
        return ()
    return tuple(
        _part(
            ranges(layers)[place.stage],
            shards[place.shard] if layout.tp > 1 else None,
            experts.own(place) if experts is not None else None,
        )
        for place in map(layout.place, layout.ranks)
    )


def _part(layers: range, shard: Shard | None, experts: range | None) -> str:
    """Layers, and the heads, columns and experts of a shard of them."""
    text = _span("layer", layers)
    routed = () if experts is None else (_span("expert", experts),)
    if shard is None:
        return ", ".join((text, *routed))
    if shard.by_plan:
        return f"{text}, part {shard.index + 1} of {shard.count} by the model's own plan"
    parts = (
        text,
        _span("query head", shard.heads),
        _span("KV head", shard.kv_heads) + ("" if shard.offered else " (a copy)"),
        _span("MLP column", shard.columns),
        _span("vocabulary row", shard.vocabulary),
        *routed,
    )
    return ", ".join(parts)


def _span(what: str, of: range) -> str:
    if len(of) == 0:
        return f"no {what}"
    return f"{what}s {of.start} to {of.stop - 1}" if len(of) > 1 else f"{what} {of.start}"
