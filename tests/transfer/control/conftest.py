"""Fixtures of the control connection's tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.transfer.control.harness import PATIENT, Both


@pytest.fixture
def both(context: Any) -> Iterator[Both]:
    made = Both(context)
    yield made
    made.loop.close()


@pytest.fixture
def lasting(context: Any) -> Iterator[Both]:
    """Of a session that ends for no other reason than what is sent."""
    made = Both(context, config=PATIENT)
    yield made
    made.loop.close()
