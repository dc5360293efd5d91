"""Pipeline split: how many layers each stage holds so that all stages take equal time. Pure arithmetic."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.sharding import attention_weights, whole_model


def stage_layers(spec: ModelSpec, stages: int, sampled_share: float) -> tuple[int, ...]:
    """Number of layers of each stage, balanced by FLOPs.

    sampled_share: rows that need the output head, per token computed; 1 when everything is decoding.
    Raises ConfigError when the model has fewer layers than there are stages.
    """
    if stages > spec.layers:
        raise ConfigError(f"{stages} stages cannot share {spec.layers} layers; write --pp {spec.layers} or less")
    costs = [layer_flops(spec, layer) for layer in range(spec.layers)]
    return split(costs, stages, head_flops(spec) * sampled_share)


def layer_flops(spec: ModelSpec, layer: int = 0) -> float:
    """FLOPs (multiplications and additions) of one layer's weight matrices per token; attention scores excluded.

    layer: counted from the model's first. Of experts, those count that a token is sent to.
    """
    if spec.library is not None:
        return 2.0 * spec.library.active[layer]
    attention = attention_weights(spec, whole_model(spec))
    if spec.moe is not None and spec.layer_kinds[layer] == "moe":
        return 2.0 * (attention + spec.moe.active_weights(spec.hidden_size))
    return 2.0 * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def head_flops(spec: ModelSpec) -> float:
    """FLOPs of the output head per sampled row. (Looking up an embedding is free.)"""
    return 2.0 * spec.hidden_size * spec.vocab_size


def split(costs: Sequence[float], stages: int, last: float = 0.0) -> tuple[int, ...]:
    """Split layers of these costs into consecutive runs of one or more layers; return the runs' lengths.

    last: extra cost of the last stage. Minimises the cost of the slowest stage; among equal splits takes the one with
    the least sum of squares, which evens out the others. Dynamic programming, O(stages · layers²).
    """
    bound = _best(costs, stages, last, lambda so_far, cost: max(so_far, cost))[0]
    return _best(costs, stages, last, lambda so_far, cost: so_far + cost * cost if cost <= bound else float("inf"))[1]


def _best(
    costs: Sequence[float], stages: int, last: float, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Least total and its split, by dynamic programming; join(total, cost) adds a stage to the stages before it."""
    before = (0.0, *accumulate(costs))
    # table[end]: the best split of the first `end` layers over the stages so far
    table: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        extra, left = (last, 0) if stage == stages - 1 else (0.0, stages - 1 - stage)
        table = {
            end: min(
                (join(total, before[end] - before[start] + extra), (*lengths, end - start))
                for start, (total, lengths) in table.items()
                if start < end
            )
            for end in range(stage + 1, len(costs) - left + 1)
        }
    return table[len(costs)]


def ranges(lengths: Sequence[int]) -> tuple[range, ...]:
    """Layer range of each stage from the number of layers of each."""
    return tuple(range(start, stop) for start, stop in pairwise((0, *accumulate(lengths))))
