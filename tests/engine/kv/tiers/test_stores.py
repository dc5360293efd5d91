"""Host and disk store alike: what is put is got, and nothing else."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.types.errors import ConfigError
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import TierError, TierStore
from tests.engine.kv.tiers.pages import PAGE, disk, get, header, page, put


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierStore]:
    made: TierStore = HostStore(28, PAGE) if request.param == "host" else disk(tmp_path)
    yield made
    made.close()


def missing(store: TierStore, slot: int) -> bool:
    with pytest.raises(TierError) as raised:
        get(store, slot)
    return raised.value.reason == "missing"


def test_pages_come_back_until_they_are_dropped(store: TierStore) -> None:
    assert store.slots == 28
    for slot in (5, 0, 27):
        put(store, slot)
    assert all(np.array_equal(get(store, slot), page(slot)) for slot in (0, 5, 27))
    put(store, 5, seed=99)
    assert np.array_equal(get(store, 5), page(99)), "the newer page"
    store.drop(5)
    store.drop(5)
    assert missing(store, 5)
    assert missing(store, 6)
    assert np.array_equal(get(store, 0), page(0))
    put(store, 5)
    assert np.array_equal(get(store, 5), page(5))
    assert list(store.take_lost()) == []


@pytest.mark.parametrize("slot", [-1, 28])
def test_slots_outside_the_tier_are_refused(store: TierStore, slot: int) -> None:
    calls: list[Callable[[], object]] = [lambda: put(store, slot), lambda: get(store, slot), lambda: store.drop(slot)]
    for call in calls:
        with pytest.raises(IndexError, match=f"slot {slot} is outside the tier of 28"):
            call()


def test_puts_and_gets_of_two_threads_do_not_disturb_each_other(store: TierStore) -> None:
    for slot in range(8):
        put(store, slot)
    errors: list[str] = []
    stop = threading.Event()

    def read() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            if not np.array_equal(get(store, turn % 8), page(turn % 8)):
                errors.append(f"slot {turn % 8}")

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(300):
        if turn >= 8:
            store.drop(8 + turn % 8)
        put(store, 8 + turn % 8, seed=turn)
        for lost in store.take_lost():  # of the disk: make it whole again, as the reader expects
            errors.extend([f"lost {lost}"] if lost < 8 else [])
    stop.set()
    reader.join()
    assert errors == []
    assert all(np.array_equal(get(store, 8 + turn % 8), page(turn)) for turn in range(292, 300))


def test_a_copy_that_fails_leaves_the_slot_empty() -> None:
    store = HostStore(2, PAGE)
    put(store, 1)
    with pytest.raises(ValueError, match="could not broadcast"):
        store.put(1, [page(2), page(3)], header(2))
    assert missing(store, 1)


def test_parts_of_a_page_lie_one_behind_the_other(store: TierStore) -> None:
    whole = page(1)
    store.put(3, [whole[:5], whole[5:40], whole[40:]], header(1))
    assert np.array_equal(get(store, 3), whole)


@pytest.mark.parametrize("at", [0, PAGE // 2, PAGE - 1])
def test_a_flipped_bit_in_memory_is_found(at: int) -> None:
    store = HostStore(2, PAGE)
    put(store, 1)
    store.get(1)[at] ^= 1
    with pytest.raises(TierError) as raised:
        store.get(1)
    assert raised.value.reason == "checksum"


def test_more_memory_than_there_are_addresses_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"--host-pages \d+ takes .* GiB, which the system refuses .*: write less"):
        HostStore(1 << 40, 1 << 20)
