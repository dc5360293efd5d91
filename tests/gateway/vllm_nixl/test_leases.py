"""Leases on pages that decode engines may read, in virtual time."""

import random

import pytest

from headrace.gateway.vllm_nixl.leases import LeaseTable
from headrace.gateway.vllm_nixl.wire import Heartbeat, ReadDone

LEASE_S, LIMIT_S = 30.0, 100.0


def table() -> LeaseTable:
    return LeaseTable(LEASE_S, LIMIT_S)


def grant(leases: LeaseTable, name: str = "r", *, jobs: int = 1, generation: int = 0, now: float = 0.0) -> None:
    leases.grant(name, f"load {name}", tokens=10, jobs=jobs, generation=generation, now=now)


def count(leases: LeaseTable, name: str, *labels: str) -> float:
    samples = leases.statistics().samples
    return next(sample.value for sample in samples if (sample.name, sample.labels) == (name, labels))


def test_one_notice_ends_a_lease() -> None:
    leases = table()
    grant(leases)
    assert leases.notice(ReadDone("r", 1), "d", 1.0) == ["load r"]
    assert len(leases) == 0
    assert leases.notice(ReadDone("r", 1), "d", 1.0) == []
    assert count(leases, "notices_total", "late") == 1
    assert leases.notice(ReadDone("foreign", 1), "d", 1.0) == []
    assert count(leases, "notices_total", "unknown") == 1


@pytest.mark.parametrize(("jobs", "readers"), [(1, 2), (3, 1), (2, 4)])
def test_each_job_is_read_by_each_worker_of_the_engine(jobs: int, readers: int) -> None:
    leases = table()
    grant(leases, jobs=jobs)
    for _ in range(jobs * readers - 1):
        assert leases.notice(ReadDone("r", readers), "d", 1.0) == []
    assert leases.notice(ReadDone("r", readers), "d", 1.0) == ["load r"]


def test_heartbeats_keep_a_lease_until_its_limit() -> None:
    leases = table()
    grant(leases)
    for now in range(5, 100, 5):
        assert leases.notice(Heartbeat(("r", "other")), "d", float(now)) == []
        leases.tick(float(now))
        assert len(leases) == 1
    assert leases.next_deadline() == LIMIT_S
    leases.tick(LIMIT_S)
    assert len(leases) == 0


def test_a_heartbeat_does_not_shorten_a_lease() -> None:
    leases = table()
    grant(leases)
    leases.notice(Heartbeat(("r",)), "d", 1.0)
    assert leases.next_deadline() == LEASE_S


def test_pages_of_an_unread_lease_are_used_again_when_nobody_can_read_them() -> None:
    leases = table()
    grant(leases, "silent")
    grant(leases, "open", now=20.0)
    leases.tick(LEASE_S)
    assert leases.has_quarantined(0)
    assert not leases.is_drained(0)
    assert leases.notice(ReadDone("open", 1), "d", 31.0) == ["load open"]
    assert leases.is_drained(0)
    assert leases.generation_ended(0) == ["load silent"]
    assert not leases.has_quarantined(0)
    assert (count(leases, "leases_ended_total", "expired"), count(leases, "tokens_unread_total")) == (1, 10)


def test_a_late_reader_ends_the_quarantine() -> None:
    leases = table()
    grant(leases)
    leases.tick(LEASE_S)
    assert leases.notice(ReadDone("r", 1), "d", 31.0) == ["load r"]
    assert leases.generation_ended(0) == []


def test_an_engine_that_has_ended_ends_its_own_leases() -> None:
    leases = table()
    for name in ("heard", "others", "unheard"):
        grant(leases, name)
    leases.notice(Heartbeat(("heard",)), "gone", 1.0)
    leases.notice(Heartbeat(("others",)), "there", 1.0)
    leases.engine_gone("gone", ["there"])
    assert count(leases, "leases_quarantined") == 1
    leases.engine_gone("there", [])
    assert count(leases, "leases_quarantined") == 3
    assert sorted(leases.generation_ended(0)) == ["load heard", "load others", "load unheard"]


def test_an_offer_that_was_not_taken_is_over_and_may_have_been_read() -> None:
    leases = table()
    grant(leases)
    leases.withdraw("load r")
    leases.withdraw("load r")
    assert (len(leases), leases.has_quarantined(0)) == (0, True)
    assert leases.generation_ended(0) == ["load r"]


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_release_every_load_once_and_never_while_it_can_be_read(seed: int) -> None:
    """Readers read until they have said so, or until the generation that offered the pages is ended."""
    rng, leases, now = random.Random(seed), table(), 0.0
    pending: dict[str, int] = {}  # notices that readers have not sent
    born: dict[str, int] = {}  # generation, by name
    released: list[str] = []
    generation, ended = 0, set[int]()

    def note(loads: list[str]) -> None:
        for load in loads:
            name = load.removeprefix("load ")
            assert load not in released
            assert pending[name] <= 0 or born[name] in ended, f"{name} can still be read"
            released.append(load)

    for number in range(400):
        kind = rng.randrange(7)
        now += rng.choice((0.0, 0.1, 3.0, 12.0))
        names = [name for name, left in pending.items() if left > 0 and born[name] not in ended]
        if kind <= 1:
            name, jobs = str(number), rng.randint(1, 3)
            grant(leases, name, jobs=jobs, generation=generation, now=now)
            pending[name], born[name] = 2 * jobs, generation
        elif kind == 2 and names:
            name = rng.choice(names)
            pending[name] -= 1
            note(leases.notice(ReadDone(name, 2), "d", now))
        elif kind == 3 and names:
            note(leases.notice(Heartbeat((rng.choice(names), "?")), rng.choice("de"), now))
        elif kind == 4:
            leases.tick(now)
        elif kind == 5 and rng.random() < 0.1:
            leases.engine_gone("d", rng.choice(([], ["e"])))
        elif kind == 5 and born:
            leases.withdraw(f"load {rng.choice(list(born))}")
        elif leases.has_quarantined(generation):
            generation += 1
        for old in range(generation):
            if old not in ended and leases.is_drained(old):
                ended.add(old)
                note(leases.generation_ended(old))
    leases.tick(now + LIMIT_S)
    for old in range(generation + 1):
        ended.add(old)
        note(leases.generation_ended(old))
    assert sorted(released) == sorted(f"load {name}" for name in born)
