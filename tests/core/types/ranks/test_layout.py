"""Layout of ranks: numbers, places and groups agree with each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.layout import Layout, Place

layouts = st.builds(Layout, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


def test_order_of_ranks() -> None:
    """rank = (stage * dp + replica) * tp + shard."""
    layout = Layout(pp=2, dp=2, tp=2)
    assert [layout.place(rank) for rank in layout.ranks] == [
        Place(stage, replica, shard) for stage in range(2) for replica in range(2) for shard in range(2)
    ]
    assert list(layout.shards(6)) == [6, 7]
    assert list(layout.across_replicas(5)) == [5, 7]
    assert list(layout.stage_ranks(1)) == [4, 5, 6, 7]
    assert layout.replica_ranks(1) == (2, 3, 6, 7)
    assert layout.sampler(1) == 6
    assert layout.name(5) == "rank 5 (stage 1, replica 0, shard 1)"
    assert Layout(pp=2).name(1) == "stage 1"


@given(layouts)
def test_groups_partition_the_ranks(layout: Layout) -> None:
    ranks = set(layout.ranks)
    assert len(ranks) == layout.pp * layout.dp * layout.tp
    for rank in ranks:
        place = layout.place(rank)
        assert layout.rank(*place) == rank
        assert [layout.place(each) for each in layout.shards(rank)] == [
            place._replace(shard=shard) for shard in range(layout.tp)
        ]
        assert [layout.place(each) for each in layout.across_replicas(rank)] == [
            place._replace(replica=replica) for replica in range(layout.dp)
        ]
        assert {layout.place(each).stage for each in layout.stage_ranks(place.stage)} == {place.stage}
    assert set().union(*(layout.replica_ranks(replica) for replica in range(layout.dp))) == ranks
    assert set().union(*(layout.stage_ranks(stage) for stage in range(layout.pp))) == ranks


@pytest.mark.parametrize("degrees", [{"pp": 0}, {"dp": -1}, {"tp": 0}])
def test_degrees_are_positive(degrees: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Layout(**degrees)
