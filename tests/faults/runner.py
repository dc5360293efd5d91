"""Runs one case of the matrix: strikes real servers under load, heals, and checks what always has to hold."""

import time
from collections import Counter
from dataclasses import dataclass

from tests.faults import invariants
from tests.faults.cells import Case
from tests.faults.load import Load, counted
from tests.faults.pair import Pair
from tests.faults.phases import scene
from tests.faults.servers import Manager

CALM_S = 10.0  # longest recovery that is asked for on a machine with nothing else to do
BUSY = 5.0  # times as long may things take on others
CALM_REQUESTS = 3  # honest ones that are served before the fault, and after it


@dataclass(frozen=True)
class Result:
    """recovery_s: from the heal to the third honest request that was served, the starts of servers and stages
    included. outcomes: of all requests of the case."""

    recovery_s: float
    outcomes: Counter[str]
    restarts: int


def run(case: Case, pair: Pair, within_s: float) -> Result:
    """Raises AssertionError for what does not hold. within_s: longest recovery."""
    before = {server.name: invariants.life(server) for server in pair.servers}
    lives = sum(server.lives for server in pair.servers)
    threads = 0 if case.phase == "idle" else 2
    with Manager(*pair.servers), Load(pair.decode.url, pair.texts, threads) as load:
        if load.threads:
            assert load.served_after(0.0, CALM_REQUESTS, 60) is not None, "served before the fault"
        with scene(pair, case.phase) as requests:
            struck, healed = _strike(case, pair)
            requests.complete()
            pair.settled()
            recovered = _recovered(load, pair, healed)
            load.end()
            ends = [*requests.results(), *load.ended]
    invariants.check_ends(pair, ends, before, case.struck.breaks)
    if bound := case.struck.ends_within_s * (BUSY if within_s > CALM_S else 1):
        late = [each for each in load.ended if each.began < struck and each.at > struck + bound]
        assert not late, f"ended later than {bound:g} s after the fault began: {late}"
    assert recovered - healed <= within_s, f"served again {recovered - healed:.1f} s after the heal"
    invariants.check_settled(pair)
    invariants.check_totals(pair, invariants.right(ends, pair.decode.url), pair.uncounted, before)
    pair.uncounted = 0
    invariants.check_left_behind(pair, before)
    restarts = sum(server.lives for server in pair.servers) - lives
    return Result(recovered - healed, counted(ends), restarts)


def _strike(case: Case, pair: Pair) -> tuple[float, float]:
    """Let the fault come and go. Returns when it did."""
    struck = time.monotonic()
    with case.struck.strike(pair):
        time.sleep(case.struck.hold_s)
    pair.clear()
    return struck, time.monotonic()


def _recovered(load: Load, pair: Pair, healed: float) -> float:
    """When honest requests were served again."""
    if not load.threads:
        load.threads = 1
        load.__enter__()
    recovered = load.served_after(healed, CALM_REQUESTS, 60)
    assert recovered is not None, f"honest requests are not served again: {load.ended[-3:]}\n{pair.decode.story}"
    return recovered
