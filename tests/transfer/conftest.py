"""Fixtures of the transfer tests: a ZMQ context, and handoffs over NIXL that are closed when a test has ended."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.transfer.harness import zmq_context
from tests.transfer.nixl_handoff import BIG, Handoff


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq_context() as made:
        yield made


@pytest.fixture
def make_handoff() -> Iterator[Any]:
    made: list[Handoff] = []
    with zmq_context() as context:

        def handoff(*arguments: Any) -> Handoff:
            made.append(Handoff(context, *arguments))
            return made[-1]

        yield handoff
        for one in made:
            one.close()


@pytest.fixture
def big(make_handoff: Any) -> Handoff:
    handoff: Handoff = make_handoff(BIG, BIG)
    handoff.join("s" * 32)
    return handoff
