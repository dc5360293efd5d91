"""Rows of experts, added up over the ranks that report them."""

from array import array

import pytest

from headrace.core.types.ranks.expert_load import ExpertLoad, imbalance, total_rows


def load(stage: int, layers: tuple[int, ...], first: int, rows: list[int]) -> ExpertLoad:
    return ExpertLoad(stage=stage, layers=layers, first=first, rows=array("q", rows).tobytes())


def test_ranks_with_other_experts_make_one_matrix() -> None:
    """Stage 0 has layers 1 and 2 on two ranks, with two and three experts; stage 1 has layer 4 on one rank."""
    loads = [
        load(1, (4,), 0, [9, 0, 0, 0, 0]),
        load(0, (1, 2), 2, [3, 4, 5, 30, 40, 50]),
        load(0, (1, 2), 0, [1, 2, 10, 20]),
    ]
    assert total_rows(loads) == {1: [1, 2, 3, 4, 5], 2: [10, 20, 30, 40, 50], 4: [9, 0, 0, 0, 0]}
    assert list(total_rows(loads)) == [1, 2, 4]


def test_copies_of_an_expert_are_added_up() -> None:
    """Free-running replicas have all experts each."""
    assert total_rows([load(0, (0,), 0, [1, 2]), load(0, (0,), 0, [10, 20])]) == {0: [11, 22]}


def test_counts_beyond_32_bits() -> None:
    assert load(0, (0,), 0, [1 << 40]).matrix() == [[1 << 40]]


def test_imbalance() -> None:
    assert imbalance([]) == 1.0
    assert imbalance([[0, 0]]) == 1.0
    assert imbalance([[5, 5, 5]]) == 1.0
    assert imbalance([[9, 0, 0]]) == 3.0
    assert imbalance([[9, 0, 0], [5, 5, 5], [0, 0, 0]]) == pytest.approx(2.0)
