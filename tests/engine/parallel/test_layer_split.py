"""The split of layers over stages, against every split there is."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError
from headrace.engine.kv.memory_plan import weight_count
from headrace.engine.model.config import spec_from_config
from headrace.engine.model.sharding import part_of
from headrace.engine.parallel.layer_split import layer_flops, ranges, split, stage_layers
from tests.engine.models import CONFIGS


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All ways to cut layers into consecutive runs of one or more."""
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(stop - start for start, stop in pairwise((0, *cut, layers))) for cut in cuts]


def stage_costs(costs: list[int], lengths: tuple[int, ...], last: int) -> list[int]:
    found = [sum(costs[part.start : part.stop]) for part in ranges(lengths)]
    found[-1] += last
    return found


@given(st.data())
def test_no_split_is_better(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    last = data.draw(st.integers(0, 30))

    def quality(lengths: tuple[int, ...]) -> tuple[int, int]:
        found = stage_costs(costs, lengths, last)
        return max(found), sum(cost * cost for cost in found)

    chosen = split(costs, stages, last)
    assert len(chosen) == stages
    assert sum(chosen) == len(costs)
    assert min(chosen) >= 1
    assert quality(chosen) == min(map(quality, every_split(len(costs), stages)))


def test_ranges_cover_all_layers_in_order() -> None:
    assert ranges((8, 8, 7, 7)) == (range(8), range(8, 16), range(16, 23), range(23, 30))


def test_equal_layers_are_spread_evenly() -> None:
    assert sorted(split([1.0] * 30, 4)) == [7, 7, 8, 8]


def test_the_head_counts_for_rows_that_are_sampled() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict())
    rarely, always = stage_layers(spec, 2, 0.001), stage_layers(spec, 2, 1.0)
    assert rarely[1] <= always[0]
    assert always == (2, 1)


def test_a_layer_costs_two_operations_per_weight() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict())
    norms = 2 * spec.hidden_size
    assert layer_flops(spec) == 2 * (weight_count(part_of(spec, range(1, 2))) - norms)


def test_more_stages_than_layers_are_refused() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict())
    with pytest.raises(ConfigError, match="--pp 3 or less"):
        stage_layers(spec, 4, 1.0)
