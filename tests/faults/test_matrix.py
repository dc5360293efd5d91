"""Every fault of the matrix, on real processes under load: see tests/faults/table.py, and docs/reliability.md."""

import pytest

from tests.faults.benches import Benches, reason_to_skip
from tests.faults.cells import Case
from tests.faults.recorder import served_within
from tests.faults.report import summary
from tests.faults.runner import run
from tests.faults.table import cases


def parameters() -> list[object]:
    """All cases; those that are not quick run in `make faults` alone."""
    return [
        pytest.param(case, id=case.name, marks=() if case.phase in case.struck.quick else pytest.mark.faults)
        for case in cases()
    ]


@pytest.mark.parametrize("case", parameters())
def test_fault(case: Case, benches: Benches, request: pytest.FixtureRequest) -> None:
    if reason := reason_to_skip(case):
        pytest.skip(reason)
    pair = benches.pair(case.struck.bench)
    try:
        result = run(case, pair, served_within(request.config))
    except BaseException:
        for server in pair.servers:
            print("recorded, for headrace replay:", *server.keep_recordings(case.name.replace("/", "-")))
        benches.drop()
        raise
    request.node.user_properties.append(("cell", (case.fault, case.place, case.phase, summary(result))))
