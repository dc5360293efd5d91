"""Tensor-parallel split of a model: which heads, MLP columns and vocabulary rows each shard holds; the part of a rank.

    SmolLM2 (9 query heads, 3 KV heads, MLP 1536 wide) on two shards:

               KV heads   query heads   MLP columns
    shard 0      0          0 to 2        768           shards wait for each other after attention and after the MLP,
    shard 1      1, 2       3 to 8        768           so more MLP does not make up for less attention

Query heads stay with the KV head that they share. With more shards than KV heads, several shards hold a copy of the
same KV head and divide its query heads. Pure arithmetic.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.library_spec import LibrarySpec

COLUMN_UNITS = (32, 16, 8, 4, 2, 1)  # MLP columns that stay together: 32 fill the widest panels of the CPU kernels
UNITS_PER_SHARD = 4  # at least, for units of more than one column; fewer would divide the work unevenly
MOST_SHARDS = 64  # looked at for what to write instead of a degree that does not work


class Shard(msgspec.Struct, frozen=True):
    """What one tensor-parallel shard holds of a model. All ranges are counted in the whole model."""

    index: int
    """The shard's number, from 0."""
    heads: range
    """Query heads."""
    kv_heads: range
    """KV heads that these query heads attend to, and that the shard's KV pool has."""
    offered: range
    """KV heads that this shard sends to peers: kv_heads, or none where a shard before it holds the same. Of latents all
    shards hold the same."""
    columns: range
    """Columns of the MLP's inner width."""
    vocabulary: range
    """Rows of the embedding and of the output head. Shorter, or empty, on the last shards."""
    vocabulary_block: int
    """Rows of the longest such range, equal on all shards."""
    count: int = 1
    """Shards in all."""
    by_plan: bool = False
    """The plan of transformers' modules says what it has of each weight (engine/library/shards.py), not the ranges."""

    @property
    def first(self) -> bool:
        """This is shard 0, which adds biases that may be added once only, and samples."""
        return self.index == 0


def split_model(spec: ModelSpec, tp: int) -> tuple[Shard, ...]:
    """The parts of all shards, in order.

    Raises ConfigError for a number of shards that the model's heads or MLP cannot be split over.
    """
    _check(spec, tp)
    if spec.library is not None:
        return tuple(_of_library(spec, each, tp) for each in range(tp))
    group = spec.heads // spec.kv_heads
    if tp <= spec.kv_heads:
        kv_heads = [range(each * spec.kv_heads // tp, (each + 1) * spec.kv_heads // tp) for each in range(tp)]
        heads = [range(held.start * group, held.stop * group) for held in kv_heads]
    else:
        copies, part = tp // spec.kv_heads, spec.heads // tp
        kv_heads = [range(each // copies, each // copies + 1) for each in range(tp)]
        heads = [range(each * part, (each + 1) * part) for each in range(tp)]
    columns = _columns(spec.intermediate_size, [len(each) for each in heads])
    block = ceil_div(spec.vocab_size, tp)
    ends = [min(each * block, spec.vocab_size) for each in range(tp + 1)]
    return tuple(
        Shard(
            index=each,
            heads=heads[each],
            kv_heads=kv_heads[each],
            offered=range(0) if each and (spec.mla or kv_heads[each] == kv_heads[each - 1]) else kv_heads[each],
            columns=columns[each],
            vocabulary=range(ends[each], ends[each + 1]),
            vocabulary_block=block,
            count=tp,
        )
        for each in range(tp)
    )


def whole_model(spec: ModelSpec) -> Shard:
    """All of a model, as its only shard."""
    return split_model(spec, 1)[0]


class RankPart(NamedTuple):
    """What one rank holds of a model."""

    spec: ModelSpec
    layers: range
    shard: Shard
    """Its share of these layers' heads and columns, and of the vocabulary."""
    experts: int | None = None
    """How many of an MoE layer's routed experts; None for all."""
    exchange_bytes: int = 0
    """Memory that is kept free for the exchange of tokens between ranks that share experts."""

    @property
    def first(self) -> bool:
        """It embeds tokens."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """It has the output head."""
        return self.layers.stop == self.spec.layers


def part_of(
    spec: ModelSpec,
    layers: range | None = None,
    shard: Shard | None = None,
    experts: int | None = None,
    exchange_bytes: int = 0,
) -> RankPart:
    """The part of a rank with these layers, shard and experts; None takes all of them."""
    return RankPart(spec, layers or range(spec.layers), shard or whole_model(spec), experts, exchange_bytes)


def _check(spec: ModelSpec, tp: int) -> None:
    if tp < 1:
        raise ConfigError(f"--tp is {tp}; it must be at least 1")
    if spec.library is not None:
        if tp > 1:
            _check_division(spec.library, tp)
        return
    if not _divides_heads(spec, tp):
        fewer = max(each for each in range(1, tp) if _divides_heads(spec, each))
        more = next((each for each in range(tp + 1, MOST_SHARDS + 1) if _divides_heads(spec, each)), 0)
        choice = f"{fewer} or {more}" if more else f"{fewer} or less"
        raise ConfigError(
            f"{spec.heads} query heads and {spec.kv_heads} KV heads cannot be split over --tp {tp}; write --tp {choice}"
        )
    if tp > spec.intermediate_size:
        raise ConfigError(
            f"an MLP {spec.intermediate_size} columns wide cannot be split over --tp {tp}; "
            f"write --tp {spec.intermediate_size} or less"
        )


def _of_library(spec: ModelSpec, index: int, count: int) -> Shard:
    """A shard of transformers' modules."""
    assert spec.library is not None
    alone = index > 0 and not any(each is not None and each.divided for each in spec.library.cached)
    return Shard(
        index=index,
        heads=range(spec.heads),
        kv_heads=range(spec.kv_heads),
        offered=range(0) if alone else range(spec.kv_heads),
        columns=range(spec.intermediate_size),
        vocabulary=range(spec.vocab_size),
        vocabulary_block=spec.vocab_size,
        count=count,
        by_plan=True,
    )


def _check_division(library: LibrarySpec, tp: int) -> None:
    division = library.division
    if division is None:
        raise ConfigError(f"{library.architecture} cannot be divided into shards: {library.undivided}; write --tp 1")
    if not division.takes(tp):
        degrees = [str(each) for each in range(1, MOST_SHARDS + 1) if division.takes(each)]
        sizes = ", ".join(map(str, division.sizes))
        raise ConfigError(
            f"{library.architecture} cannot be split over --tp {tp}, which does not divide its heads and inner widths "
            f"({sizes}); write --tp {' or '.join(degrees)}"
        )


def _divides_heads(spec: ModelSpec, tp: int) -> bool:
    """Whether every shard gets whole query heads, of one KV head if there are more shards than KV heads."""
    copies = tp // spec.kv_heads
    return tp <= spec.kv_heads or (tp % spec.kv_heads == 0 and (spec.heads // spec.kv_heads) % copies == 0)


def _columns(width: int, heads: list[int]) -> list[range]:
    """MLP columns of each shard: equally many, as far as whole units allow. heads: of each shard; what is left over
    goes to those with the fewest.

    Uneven heads are not made up for: the outputs of attention are added up before the MLP begins, so that a layer takes
    the time of the slowest attention and that of the slowest MLP.
    """
    unit = next((unit for unit in COLUMN_UNITS if width // unit >= UNITS_PER_SHARD * len(heads)), 1)
    each, left = divmod(ceil_div(width, unit), len(heads))
    more = sorted(range(len(heads)), key=heads.__getitem__)[:left]
    ends = [min(unit * end, width) for end in accumulate(each + (shard in more) for shard in range(len(heads)))]
    return [range(*ends_of) for ends_of in pairwise((0, *ends))]


def attention_weights(spec: ModelSpec, shard: Shard) -> int:
    """Number of weights of a shard's linear layers in one attention block."""
    if spec.mla:
        return spec.mla.weights(spec.hidden_size, len(shard.heads))
    return spec.hidden_size * 2 * (len(shard.heads) + len(shard.kv_heads)) * spec.head_dim
