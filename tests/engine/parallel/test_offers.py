"""Which ranks offer KV, against what peers demand: each head of each layer exactly once."""

import pytest

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.ranks.layout import Layout
from headrace.engine.kv.memory_plan import stage_geometry
from headrace.engine.model.sharding import part_of, split_model
from headrace.engine.model.stub import parse_stub
from headrace.engine.parallel.layer_split import ranges
from headrace.engine.parallel.offers import check_offers, offer
from headrace.transfer.protocol.matching import check_geometries

WHOLE = (Geometry("float32", layers=4, kv_heads=2, head_dim=16, page_size=16),)
SPEC = parse_stub("stub:layers=4,hidden=128,heads=8,kv_heads=2,vocab=300").spec()


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 8)])
def test_offering_ranks_have_each_head_once_and_are_numbered_in_order(pp: int, tp: int) -> None:
    layout = Layout(pp=pp, tp=tp)
    shards, layers = split_model(SPEC, tp), ranges((4 // pp,) * pp)
    pools = [
        stage_geometry(part_of(SPEC, layers[place.stage], shards[place.shard]), "float32", 16)
        for place in map(layout.place, layout.ranks)
    ]
    offers = [offer(layout, rank, SPEC) for rank in layout.ranks]
    offered = tuple(pool for pool, each in zip(pools, offers, strict=True) if each.offers)
    assert check_geometries(WHOLE, offered) is None
    assert [each.number for each in offers if each.offers] == list(range(len(offered)))
    assert check_geometries(WHOLE, tuple(pools), replicas=True) is None, "a receiving server names every copy"


def test_more_ranks_than_a_server_can_list_are_refused() -> None:
    layout, shards = Layout(pp=32, tp=4), split_model(SPEC, 4)
    check_offers(layout, shards, receives=False)  # of 128 ranks, 64 offer KV
    with pytest.raises(ConfigError, match=r"128 ranks would take KV.*64 of them at most: write --pp 16 or less"):
        check_offers(layout, shards, receives=True)
    with pytest.raises(ConfigError, match=r"66 ranks would offer KV.*write --pp 32 or less"):
        check_offers(Layout(pp=33, tp=4), shards, receives=False)
