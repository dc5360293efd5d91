"""Random streams of orders to all ranks of a server, in threads with random delays: tokens are those of one rank."""

import random

import msgspec
import pytest

from headrace.core.types.ranks.layout import Layout
from headrace.engine.orders import OrderMismatch
from tests.e2e.models import StubOracle
from tests.engine.parallel.thread_ranks import ORDERS, SIZES, Asked, Damage, ThreadServer, serving

ORACLE = StubOracle(SIZES, 128)
LAYOUTS = [Layout(2, 1, 2), Layout(1, 2, 2), Layout(2, 2, 1), Layout(2, 2, 2), Layout(1, 4, 2)]
FULL = pytest.mark.full


def requests(rng: random.Random, count: int) -> list[Asked]:
    """Prompts of up to 70 tokens, some of which begin with others, with up to 8 tokens after them."""
    shared = [rng.randrange(300) for _ in range(40)]
    found = []
    for _ in range(count):
        own = [rng.randrange(300) for _ in range(rng.randrange(1, 30))]
        prompt = [*shared[: rng.choice((0, 0, 17, 40))], *own]
        found.append(Asked(prompt, rng.randrange(1, 9), aborted=rng.random() < 0.2))
    return found


def check(server: ThreadServer, asked: list[Asked]) -> None:
    for number, each in enumerate(asked):
        gold = list(ORACLE.greedy(each.prompt, each.tokens))
        found = server.tokens[str(number)]
        assert found == gold or (each.aborted and found == gold[: len(found)]), number


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.pp}-{layout.dp}-{layout.tp}")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=FULL) for seed in range(2, 40))])
def test_random_streams(layout: Layout, seed: int) -> None:
    """S2, S4, S6, S9: every rank gets the orders of its replica and takes part in every pass; digests are equal."""
    asked = requests(random.Random(seed), 5 * layout.dp)
    with serving(layout, seed) as server:
        server.serve(asked)
        kept = max(map(server.world.kept, layout.ranks))
    assert server.failures == []
    assert server.passes > 5
    assert kept <= 3 * server.config.credits, "of the plans in flight: what is sent, received and broadcast"
    check(server, asked)


def dropped(two: list[bytes]) -> list[bytes]:
    return two[1:]


def swapped(two: list[bytes]) -> list[bytes]:
    return two[::-1]


def altered(two: list[bytes]) -> list[bytes]:
    order = ORDERS.decode(two[0])
    return [ORDERS.encode(msgspec.structs.replace(order, seq=order.seq + 1000)), two[1]]


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (Layout(2, 1, 2), 3),
        pytest.param(Layout(2, 2, 1), 1, marks=FULL),
        (Layout(1, 2, 2), 1),
        pytest.param(Layout(2, 2, 2), 6, marks=FULL),
    ],
    ids=lambda value: f"{value.pp}-{value.dp}-{value.tp}" if isinstance(value, Layout) else f"rank {value}",
)
@pytest.mark.parametrize("damage", [dropped, swapped, altered])
def test_damage_for_one_rank_ends_all_at_the_next_heartbeat(layout: Layout, rank: int, damage: Damage) -> None:
    asked = [Asked(each.prompt, each.tokens) for each in requests(random.Random(5), 5 * layout.dp)]
    with serving(layout, seed=5) as server:
        server.damage(rank, 9, damage)
        server.serve(asked)
    assert [error for number, error in server.failures if number == rank and isinstance(error, OrderMismatch)]
    assert not [error for number, error in server.failures if number != rank and isinstance(error, OrderMismatch)]
