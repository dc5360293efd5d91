"""How often an idle scheduler checks its own state, and that it finds what is planted there."""

import pytest

from headrace.core.messages.frontend import QueryStats
from headrace.core.messages.replies import StatsReply
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.lifecycle.integrity import PAGES_PER_PROBE, UNCHANGED_PROBES
from headrace.scheduler.scheduler import Effect
from tests.scheduler.bench import Bench, only

LARGE = 65_536
PROBES = max(LARGE // PAGES_PER_PROBE, UNCHANGED_PROBES)


class UncheckedBench(Bench):
    """One whose scheduler is left to check itself."""

    def _keep(self, effects: list[Effect]) -> list[Effect]:
        return effects


def probed(bench: Bench) -> float:
    """The number of problems that the answer to a probe tells."""
    stats = only(bench.do(QueryStats(token=1)), StatsReply).stats
    return next(sample.value for sample in stats.samples if sample.name == "integrity_errors")


def computed(bench: Bench, rid: str) -> None:
    bench.submit(rid, 10, cache_salt=rid, max_tokens=1)
    forward = bench.plan()
    assert forward is not None
    bench.done(forward, 5)
    assert bench.scheduler.idle


def leak_a_page(bench: Bench) -> None:
    bench.scheduler._state.replicas[0].cache._allocator.allocate(1, 999)


def leaked(bench: Bench) -> int:
    allocator = bench.scheduler._state.replicas[0].cache._allocator
    return next(page for page in range(allocator.total) if allocator.owner(page) == 999)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the pages of the pool with each walk over them."""
    pages: list[int] = []
    walk = KvCache.check

    def counted(cache: KvCache) -> list[str]:
        pages.append(cache.total)
        return walk(cache)

    monkeypatch.setattr(KvCache, "check", counted)
    return pages


@pytest.mark.parametrize("busy", [False, True])
def test_probes_walk_few_pages_on_average(walks: list[int], busy: bool) -> None:
    """Whether or not requests come in between."""
    bench, probes = UncheckedBench(kv_pages=LARGE), 4 * PROBES
    for number in range(probes):
        if busy:
            computed(bench, f"r{number}")
        assert probed(bench) == 0
    assert sum(walks) <= LARGE + probes * PAGES_PER_PROBE


def test_a_state_that_does_not_change_is_not_walked_every_time(walks: list[int]) -> None:
    bench = UncheckedBench(kv_pages=64)
    for _ in range(UNCHANGED_PROBES):
        probed(bench)
    assert len(walks) == 1
    computed(bench, "r")
    probed(bench)
    assert len(walks) == 2, "a small pool is walked at the first probe after a change"


@pytest.mark.parametrize("pages", [64, LARGE])
def test_a_leaked_page_is_found_and_so_is_its_end(pages: int) -> None:
    bench = UncheckedBench(kv_pages=pages)
    computed(bench, "r")
    assert probed(bench) == 0
    leak_a_page(bench)
    assert any(probed(bench) > 0 for _ in range(PROBES))
    bench.scheduler._state.replicas[0].cache._allocator.release([leaked(bench)], 999)
    assert any(probed(bench) == 0 for _ in range(PROBES)), "problems are looked at again"
