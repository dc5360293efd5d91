"""What tenants are served is counted by tenant: no salt becomes a label, and there is a bound on labels."""

import pytest

from headrace.scheduler.telemetry.measurements import MAX_TENANTS
from tests.scheduler.bench import Bench

NAME = "tenant_seconds_total"


@pytest.mark.parametrize("policy", ["fcfs", "srpt", "slo"])
def test_computed_seconds_are_counted_and_cached_tokens_are_not(policy: str) -> None:
    bench = Bench(policy=policy)
    bench.submit("a", 40, max_tokens=1, tenant="acme")
    bench.compute(7)
    first = bench.metric(NAME, "acme")
    assert first > 0
    bench.submit("b", 40, max_tokens=1, tenant="acme")
    bench.compute(7)
    assert first < bench.metric(NAME, "acme") < 1.5 * first


def test_salts_are_no_labels() -> None:
    bench = Bench()
    bench.submit("a", 10, max_tokens=1, cache_salt="secret")
    bench.compute(7)
    bench.submit("b", 10, max_tokens=1)
    bench.compute(7)
    labels = {sample.labels for sample in bench.scheduler.statistics(bench.now).samples if sample.name == NAME}
    assert labels == {("salted",), ("anonymous",)}


def test_labels_are_bounded() -> None:
    bench = Bench()
    for number in range(MAX_TENANTS + 3):
        bench.submit(str(number), [number, 1, 2], max_tokens=1, tenant=f"tenant {number}")
        bench.compute(7)
    labels = {sample.labels for sample in bench.scheduler.statistics(bench.now).samples if sample.name == NAME}
    assert len(labels) == MAX_TENANTS + 1
    assert ("other",) in labels
