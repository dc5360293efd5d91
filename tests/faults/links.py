"""Faults of connections, made by relays: latency, bandwidth, cuts, silence, resets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.faults.cells import Strike
from tests.faults.pair import LINKS, Pair
from tests.faults.relay import Relay, Way

Change = Callable[[Relay], None]


def changed(link: str, change: Change) -> Strike:
    """Every relay whose link begins so is changed, and good again afterwards."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        for name in LINKS:
            if name.startswith(link):
                change(pair.relays[name])
        try:
            yield
        finally:
            pair.clear()

    return strike


def both_ways(change: Callable[[Way], None]) -> Change:
    def change_both(relay: Relay) -> None:
        change(relay.up)
        change(relay.down)

    return change_both


def late(way: Way) -> None:
    way.delay_s, way.jitter_s = 0.1, 0.1


def narrow(way: Way) -> None:
    way.bytes_per_s = 20e3


def in_pieces(way: Way) -> None:
    way.piece = 700


def by_bytes(way: Way) -> None:
    way.piece = 1


def silent_up(relay: Relay) -> None:
    relay.up.silent = True


def silent_down(relay: Relay) -> None:
    relay.down.silent = True


def silent(relay: Relay) -> None:
    relay.up.silent = relay.down.silent = True


def reset(relay: Relay) -> None:
    relay.reset()


def refused(relay: Relay) -> None:
    relay.refusing = True
    relay.reset()


def half_open(relay: Relay) -> None:
    relay.half_open()
