"""Planted bugs are found: the schedules check what the guarantees promise."""

import pytest

from tests.soak.mutants import MUTANTS, Mutant, hunt

LIMIT = 10_000
QUICK = ("a request ends twice", "an acknowledgement of one stage counts for all", "pages of ended tickets count")


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.name, marks=() if one.name.startswith(QUICK) else pytest.mark.full) for one in MUTANTS],
)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    found = hunt(mutant, LIMIT)
    assert found is not None, f"no schedule of {LIMIT} breaks {mutant.guarantee}: a check is missing"
    print(f"\n{mutant.guarantee} {mutant.name}: found by schedule {found.schedules}, {found.problem[:100]}")


def test_there_is_a_planted_bug_for_every_guarantee() -> None:
    assert {mutant.guarantee for mutant in MUTANTS} == {f"G{number}" for number in range(1, 9)}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
