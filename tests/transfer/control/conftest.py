"""Fixtures of the control connection's tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.transfer.control.harness import Both


@pytest.fixture
def both(context: Any) -> Iterator[Both]:
    made = Both(context)
    yield made
    made.loop.close()
