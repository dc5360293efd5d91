"""The pairs of the fault matrix, one at a time."""

from collections.abc import Iterator

import pytest

from tests.faults.benches import Benches


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    made = Benches()
    yield made
    made.end()
