"""docs/reliability.md has the cells of the matrix, each with a result, and the matrix has a cell for every place."""

from pathlib import Path

from tests.faults import report
from tests.faults.cells import PLACES, NotApplicable, Proven
from tests.faults.table import faults

ROOT = Path(__file__).parents[2]
DOCUMENT = report.DOCUMENT.read_text(encoding="utf-8")


def test_every_fault_has_a_cell_for_every_place() -> None:
    for _, fault in faults():
        assert tuple(sorted(fault.cells)) == tuple(sorted(PLACES)), fault.name
        assert all(cell.why for cell in fault.cells.values() if isinstance(cell, NotApplicable)), fault.name


def test_the_document_has_every_cell_with_a_result() -> None:
    found = report.parse(DOCUMENT)
    assert set(found) == set(report.cells_with_results()), "make faults writes them"
    bad = {key: text for key, text in found.items() if text in ("", report.NOT_RUN) or "FAILED" in text}
    assert not bad


def test_the_document_says_why_faults_do_not_apply() -> None:
    expected = {
        (fault.name, place): cell.why
        for _, fault in faults()
        for place, cell in fault.cells.items()
        if isinstance(cell, NotApplicable)
    }
    assert report.excuses(DOCUMENT) == expected


def test_the_tests_that_cells_name_exist() -> None:
    for _, fault in faults():
        for cell in fault.cells.values():
            for test in cell.tests if isinstance(cell, Proven) else ():
                path, _, name = test.partition("::")
                assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
