"""G1 to G5 and G7 on a bad network: losses, repeats, delays, cuts, cancels and restarts at random, in virtual time.

`make soak HOURS=1` goes on with other seeds.
"""

from collections import Counter

import pytest

from headrace.core.types.kv.geometry import Geometry
from tests.transfer.decode_side import DecodeSide
from tests.transfer.memory_agents import MemoryAgents
from tests.transfer.memory_pools import MemoryPools
from tests.transfer.memory_zmq import Faults, Network
from tests.transfer.prefill_side import PrefillSide
from tests.transfer.schedules import ProtocolSchedule, run_schedule
from tests.transfer.world import World

GEOMETRY = Geometry("float16", layers=2, kv_heads=1, head_dim=4, page_size=8)


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=pytest.mark.full if block > 2 else ()) for block in range(20)]
)
def test_every_schedule_keeps_the_guarantees(block: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(100 * block, 100 * block + 100):
        try:
            ends.update(run_schedule(ProtocolSchedule(seed)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert all(ends[kind] for kind in ("arrived", "cancelled", "failed", "timeout", "down")), ends


def test_a_peer_whose_connections_crawl_costs_another_one_nothing() -> None:
    """G7: two peers at one server; one's messages take seconds each. The other's fetches take as long as alone."""

    def fetches(crawling: bool) -> list[float]:
        network = Network(5, Faults())
        world = World(network, GEOMETRY.page_size, MemoryPools(network, 5), MemoryAgents(network, 5))
        prefill = PrefillSide(world, GEOMETRY)
        quick, slow = (DecodeSide(world, GEOMETRY, "tcp://127.0.0.1:7000") for _ in range(2))
        world.sides = [prefill, quick, slow]
        world.run(1.0)
        if crawling:
            network.crawl = {socket: 1.0 for port in slow.ports for socket in port.sockets()}
            slow.fetch("t9")
        times = []
        for number in range(5):
            started = network.now
            quick.fetch(f"t{number}")
            while quick.open:
                world.run(network.now + 0.001)
            times.append(network.now - started)
        assert [one.end for one in quick.ended] == ["arrived"] * 5
        assert not crawling or slow.open
        return times

    alone = fetches(crawling=False)
    beside = fetches(crawling=True)
    assert max(beside) <= max(alone) + 0.1
