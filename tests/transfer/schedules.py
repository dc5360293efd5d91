"""One random schedule: a prefill and a decode side on a bad network, with cancels and restarts, checked as it runs.

Every other pair of seeds has components beside keys and values, every third seed another backend, and every fifth pools
in the memory of GPUs.
"""

from dataclasses import dataclass

from headrace.core.types.kv.backends import NIXL, SHM, ZMQ
from headrace.core.types.kv.geometry import Component, Geometry
from tests.transfer.decode_side import FINGERPRINT, DecodeSide
from tests.transfer.harness import value
from tests.transfer.memory_agents import MemoryAgents
from tests.transfer.memory_pools import MemoryPools
from tests.transfer.memory_zmq import Faults, Network
from tests.transfer.prefill_side import PrefillSide
from tests.transfer.world import PAGES, STATE, World

COMPONENTS = (
    Component("draft", "float16", layers=1, kv_heads=2, head_dim=2),
    Component("latent", "float32", layers=2, kv_heads=1, head_dim=3, planes=1),
    Component(STATE, "float32", layers=2, kv_heads=1, head_dim=20, planes=1, per_request=True),
)
SETTLE_S = 15.0
LATE_S = 3.0  # more than the longest delay of a message, and than the silence after which a session ends


@dataclass(frozen=True, slots=True)
class ProtocolSchedule:
    """What to run. Everything else follows from the seed."""

    seed: int
    steps: int | None = None
    """Fetches, cancels and restarts; None draws 5 to 14."""

    loss: bool = True
    """The network may lose messages."""

    repeat: bool = True
    delay: bool = True
    cut: bool = True
    damage: bool = True
    """Bytes of payloads may change."""

    components: bool = True
    """There may be KV beside keys and values."""

    devices: bool = True
    """Pools may be in the memory of GPUs."""

    skipped: tuple[int, ...] = ()
    """Numbers of the steps that are left out."""


def run_schedule(schedule: ProtocolSchedule) -> dict[str, int]:
    """Run one schedule and see to G1 to G7; AssertionError says which one is broken. Returns how its uses ended."""
    seed = schedule.seed
    network = Network(seed, Faults())
    random = network.random

    def rate() -> float:
        return random.choice((0.0, 0.0, random.uniform(0.01, 0.2)))

    drop, repeat, delay, cut, damage = rate(), rate(), rate() * 3, rate() / 4, rate() / 2
    network.faults = faults = Faults(
        drop=drop * schedule.loss,
        repeat=repeat * schedule.repeat,
        delay=delay * schedule.delay,
        cut=cut * schedule.cut,
        damage=damage * schedule.damage,
    )
    sizes = random.choice((4, 8, 16)), random.choice((4, 8, 16))
    components = COMPONENTS if seed % 4 >= 2 and schedule.components else ()
    source, destination = (
        Geometry("float16", layers=2, kv_heads=1, head_dim=4, page_size=size, components=components) for size in sizes
    )
    world = World(
        network,
        sizes[1],
        MemoryPools(network, seed),
        MemoryAgents(network, seed),
        (ZMQ, SHM, NIXL)[seed % 3],
        devices=seed % 5 == 4 and schedule.devices,
    )
    prefill = PrefillSide(world, source)
    decode = DecodeSide(world, destination, "tcp://127.0.0.1:7000")
    world.sides = [prefill, decode]
    stopped = False
    tickets = 6 if schedule.steps is None else 2  # a few steps should use one twice
    drawn = random.randrange(5, 15)
    for number in range(drawn if schedule.steps is None else schedule.steps):
        world.run(network.now + random.uniform(0, 0.6))
        kind = random.random()
        if number in schedule.skipped:
            continue
        if kind < 0.75:
            decode.fetch(f"t{random.randrange(tickets)}")
        elif kind < 0.93:
            for one in random.sample(list(decode.open.values()), min(1, len(decode.open))):
                decode.cancel(one, "cancelled")
        elif kind < 0.95:
            stopped = not stopped
        elif kind < 0.97:
            prefill.kill()
            prefill = PrefillSide(world, source)
        else:
            decode.kill()
            model = FINGERPRINT if random.random() < 0.7 else "another model"
            decode = DecodeSide(world, destination, "tcp://127.0.0.1:7000", model)
        # What a stopped process has begun to write goes on.
        world.sides = [decode] if stopped else [prefill, decode]
    world.sides = [prefill, decode]
    network.faults = Faults()
    _settle(world, prefill, decode)
    _settled(prefill, decode, lossless=not faults.drop)
    return {end: sum(one.end == end for one in decode.ended) for end in {one.end for one in decode.ended}}


def _settle(world: World, prefill: PrefillSide, decode: DecodeSide) -> None:
    """Run on a good network until all has ended, and then for as long as anything may still come late."""
    until = world.network.now + SETTLE_S
    while world.network.now < until and (prefill.open or decode.open):
        world.run(world.network.now + 0.5)
    world.run(min(until, world.network.now + LATE_S))


def _settled(prefill: PrefillSide, decode: DecodeSide, lossless: bool) -> None:
    """G1: every use has ended at both sides, and nothing is left over."""
    assert not prefill.open, f"open at the prefill side (G1): {prefill.open}"
    assert not decode.open, f"open at the decode side (G1): {decode.open}"
    assert sorted(prefill.free) == sorted(decode.free) == list(range(PAGES))
    assert value(prefill.control_server.statistics(), "open_tickets") == 0
    counted = [peer.pages for peer in prefill.control_server._sessions._by_session.values()]
    assert not any(counted), f"peers without a ticket are counted as having {counted} pages (G7)"
    assert value(prefill.sender.statistics(), "queued_chunks") == 0
    assert value(decode.receiver.statistics(), "expected_requests") == 0
    if lossless:  # a lost answer takes its part of the window with it until the connection ends
        assert value(prefill.sender.statistics(), "unacked_bytes") == 0
