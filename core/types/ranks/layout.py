"""Layout of the ranks of a server: pipeline stages, data-parallel replicas and tensor-parallel shards. Pure arithmetic.

    rank = (stage * dp + replica) * tp + shard        for pp 2, dp 2, tp 2:

                 replica 0          replica 1
              shard 0  shard 1   shard 0  shard 1
    stage 0      0        1         2        3
    stage 1      4        5         6        7

Ranks of a stage exchange most and are neighbours: launchers put neighbouring ranks on one machine.
"""

from typing import NamedTuple

import msgspec

from headrace.core.types.errors import ConfigError


class Place(NamedTuple):
    """Coordinates of a rank."""

    stage: int
    """Pipeline position: which layers."""
    replica: int
    """Data-parallel copy: which requests. Each has KV pools and a prefix tree of its own."""
    shard: int
    """Tensor-parallel part of the layers: which heads and columns."""


class Layout(msgspec.Struct, frozen=True):
    """Degrees of parallelism of a server. Raises ConfigError for a degree below 1."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Tensor-parallel shards of each stage of each replica."""

    def __post_init__(self) -> None:
        for name, degree in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp)):
            if degree < 1:
                raise ConfigError(f"--{name} is {degree}; it must be at least 1")

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.pp * self.dp * self.tp)

    def rank(self, stage: int, replica: int = 0, shard: int = 0) -> int:
        """The rank at a place."""
        return (stage * self.dp + replica) * self.tp + shard

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        group, shard = divmod(rank, self.tp)
        return Place(*divmod(group, self.dp), shard)

    def shards(self, rank: int) -> range:
        """Ranks of the same stage and replica: the tensor-parallel group."""
        first = rank - rank % self.tp
        return range(first, first + self.tp)

    def stage_ranks(self, stage: int) -> range:
        """Ranks of a stage, of all replicas: the expert-parallel group."""
        first = self.rank(stage)
        return range(first, first + self.dp * self.tp)

    def across_replicas(self, rank: int) -> range:
        """Ranks of the same stage and shard, in the order of their replicas."""
        stage, _, shard = self.place(rank)
        return range(self.rank(stage, 0, shard), self.rank(stage + 1), self.tp)

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """Ranks of a replica, of all stages, in ascending order."""
        return tuple(rank for stage in range(self.pp) for rank in self.shards(self.rank(stage, replica)))

    def sampler(self, replica: int = 0) -> int:
        """The rank that samples the tokens of a replica: the first shard of its last stage."""
        return self.rank(self.pp - 1, replica)

    def name(self, rank: int) -> str:
        """A rank in words, for messages: "stage 1", or "rank 5 (stage 1, replica 0, shard 1)"."""
        stage, replica, shard = self.place(rank)
        if self.dp == self.tp == 1:
            return f"stage {stage}"
        return f"rank {rank} (stage {stage}, replica {replica}, shard {shard})"
