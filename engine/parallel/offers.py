"""Which ranks offer KV to peers, and the numbers that these have on the wire. Pure.

More shards than KV heads hold copies of the same KV. Of those, one offers it, so that a peer is sent every byte once:

    4 shards, 2 KV heads     rank   0   1   2   3 │  4   5   6   7
                             head   0   0   1   1 │  0   0   1   1
                             offers *       *     │  *       *
                             stage  0       1     │  2       3         number in Welcome
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.layout import Layout
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.sharding import Shard, split_model
from headrace.transfer.protocol.messages import MAX_STAGES


class Offer(NamedTuple):
    """What a rank offers to peers."""

    number: int
    """Its number in Welcome: its place among the ranks that offer KV. Without meaning for the others."""
    offers: bool
    """Whether it offers its pool, or what only it has of that (LoadPlan.offered)."""


def offer(layout: Layout, rank: int, spec: ModelSpec) -> Offer:
    """What a rank of a model offers. Raises ConfigError for a number of shards that the model cannot be split over."""
    return place_offer(layout, rank, [len(shard.offered) > 0 for shard in split_model(spec, layout.tp)])


def check_offers(layout: Layout, shards: Sequence[Shard], *, receives: bool) -> None:
    """Raises ConfigError when there are more ranks than Welcome can list, or Hello on a server that receives KV."""
    each = layout.dp * sum(receives or len(shard.offered) > 0 for shard in shards)
    if (found := layout.pp * each) > MAX_STAGES:
        raise ConfigError(
            f"{found} ranks would {'take' if receives else 'offer'} KV, and a server lists {MAX_STAGES} of them at "
            f"most: write --pp {max(1, MAX_STAGES // each)} or less, or a lower --tp"
        )


def place_offer(layout: Layout, rank: int, offering: Sequence[bool]) -> Offer:
    """As offer(). offering: whether each shard of a stage does."""
    return Offer(
        number=sum(offering[layout.place(before).shard] for before in range(rank)),
        offers=offering[layout.place(rank).shard],
    )
