"""Every head, MLP column and vocabulary row is at exactly one shard, but for copies of KV heads."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config import ModelSpec, RopeSpec
from headrace.engine.model.sharding import Shard, split_model, whole_model
from headrace.engine.model.source import load_spec, resolve_source


def spec_of(heads: int, kv_heads: int, inner: int = 1536, vocabulary: int = 1000, head_dim: int = 64) -> ModelSpec:
    return ModelSpec(
        family="llama", vocab_size=vocabulary, hidden_size=576, intermediate_size=inner, layers=2, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, norm_eps=1e-5, rope=RopeSpec(), max_positions=512,
    )  # fmt: skip


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A model and a number of shards that it can be split over."""
    kv_heads = draw(st.integers(1, 16))
    copies = draw(st.integers(1, 4))
    heads = kv_heads * copies * draw(st.integers(1, 4))
    tp = draw(st.one_of(st.integers(1, kv_heads), st.just(kv_heads * copies)))
    inner = draw(st.integers(tp, 3000))
    return spec_of(heads, kv_heads, inner, draw(st.integers(1, 500)), draw(st.sampled_from([8, 64, 128]))), tp


@given(splits())
def test_everything_is_held_once(case: tuple[ModelSpec, int]) -> None:
    spec, tp = case
    shards = split_model(spec, tp)
    assert [shard.index for shard in shards] == list(range(tp))
    assert list(chain(*(shard.heads for shard in shards))) == list(range(spec.heads))
    assert list(chain(*(shard.columns for shard in shards))) == list(range(spec.intermediate_size))
    assert list(chain(*(shard.vocabulary for shard in shards))) == list(range(spec.vocab_size))
    assert list(chain(*(shard.offered for shard in shards))) == list(range(spec.kv_heads))
    assert all(shard.columns and shard.heads for shard in shards)
    assert max(len(shard.vocabulary) for shard in shards) == shards[0].vocabulary_block


@given(splits())
def test_query_heads_have_their_kv_heads_with_them(case: tuple[ModelSpec, int]) -> None:
    spec, tp = case
    group = spec.heads // spec.kv_heads
    shards = split_model(spec, tp)
    for shard in shards:
        local = len(shard.heads) // len(shard.kv_heads)  # by which the attention kernels assign heads
        for place, head in enumerate(shard.heads):
            assert shard.kv_heads[place // local] == head // group
        assert shard.offered in (shard.kv_heads, range(0))
    for before, shard in pairwise(shards):
        assert bool(shard.offered) == (shard.kv_heads != before.kv_heads), "the lowest shard offers"


@given(splits())
def test_columns_are_even_as_far_as_whole_units_allow(case: tuple[ModelSpec, int]) -> None:
    """Whatever the heads are: shards wait for each other between attention and the MLP."""
    spec, tp = case
    counts = [len(shard.columns) for shard in split_model(spec, tp)]
    unit = next((unit for unit in (32, 16, 8, 4, 2, 1) if spec.intermediate_size // unit >= 4 * tp), 1)
    assert max(counts) - min(counts) < 2 * unit


def test_one_shard_holds_all() -> None:
    assert whole_model(spec_of(9, 3)) == Shard(0, range(9), range(3), range(3), range(1536), range(1000), 1000)


def test_the_bundled_model_on_two_shards() -> None:
    first, second = split_model(load_spec(resolve_source("smollm2")), 2)
    assert (first.heads, first.kv_heads, first.columns) == (range(3), range(1), range(768))
    assert (second.heads, second.kv_heads, second.columns) == (range(3, 9), range(1, 3), range(768, 1536))
    assert (first.offered, second.offered) == (range(1), range(1, 3))


def test_more_shards_than_kv_heads() -> None:
    shards = split_model(spec_of(12, 2), 4)
    assert [shard.kv_heads for shard in shards] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [shard.heads for shard in shards] == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    assert [shard.offered for shard in shards] == [range(1), range(0), range(1, 2), range(0)]


def test_even_heads_have_even_columns() -> None:
    assert [len(shard.columns) for shard in split_model(spec_of(32, 8, 14336), 8)] == [1792] * 8


def test_what_is_left_over_goes_to_those_with_the_fewest_heads() -> None:
    assert [len(shard.columns) for shard in split_model(spec_of(9, 3, inner=32 * 25), 2)] == [13 * 32, 12 * 32]
    assert [len(shard.columns) for shard in split_model(spec_of(8, 4, inner=32 * 25), 3)] == [9 * 32, 8 * 32, 8 * 32]


def test_columns_come_in_units_of_32_where_there_are_enough() -> None:
    for tp in (2, 3):
        assert all(shard.columns.start % 32 == 0 for shard in split_model(spec_of(9, 3), tp))
    assert [len(shard.columns) for shard in split_model(spec_of(4, 4, inner=80), 4)] == [20] * 4
    assert [len(shard.columns) for shard in split_model(spec_of(4, 4, inner=5), 4)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("spec", "tp", "message"),
    [
        (spec_of(9, 3), 0, "--tp is 0; it must be at least 1"),
        (spec_of(9, 3), 4, "9 query heads and 3 KV heads cannot be split over --tp 4; write --tp 3 or 9"),
        (spec_of(32, 8), 12, "write --tp 8 or 16"),
        (spec_of(32, 8), 64, "write --tp 32 or less"),
        (spec_of(6, 2), 4, "write --tp 2 or 6"),
        (spec_of(8, 8, inner=5), 8, "an MLP 5 columns wide cannot be split over --tp 8; write --tp 5 or less"),
    ],
)
def test_splits_that_do_not_work_say_what_does(spec: ModelSpec, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_model(spec, tp)
