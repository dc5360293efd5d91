"""Collects the results of the matrix while pytest runs."""

from typing import Any

import pytest

from tests.faults.cells import Proven
from tests.faults.report import Key
from tests.faults.table import faults

NAME = "fault-recorder"
PATIENT_S = 60.0  # beside other tests a machine may be busy


class Recorder:
    """A plugin. within_s: longest time from a heal to honest requests that are served."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self.results: dict[Key, str] = {}
        self._elsewhere: dict[str, list[tuple[str, str]]] = {}
        for _, fault in faults():
            for place, cell in fault.cells.items():
                for test in cell.tests if isinstance(cell, Proven) else ():
                    self._elsewhere.setdefault(test, []).append((fault.name, place))

    def tests(self) -> list[str]:
        """Tests elsewhere that cells name."""
        return list(self._elsewhere)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cell" and report.when == "call":
                fault, place, phase, text = value
                self.results[fault, place, phase] = text
        if report.when == "call" or not report.passed:
            self._elsewhere_ended(report)
            if "test_matrix" in report.nodeid and not report.passed:
                fault, place, phase = (
                    report.nodeid.partition("[")[2].rstrip("]").rsplit(": ", 2)
                )  # a fault may have a colon
                self.results[fault, place, phase] = "skipped" if report.skipped else "FAILED"

    def _elsewhere_ended(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        for fault, place in self._elsewhere.get(test, ()):
            before = self.results.get((fault, place, test), "passed")
            text = "passed" if report.passed else "skipped" if report.skipped else "FAILED"
            self.results[fault, place, test] = text if before == "passed" else before


def served_within(config: Any) -> float:
    """The bound of this run."""
    recorder = config.pluginmanager.get_plugin(NAME)
    return recorder.within_s if isinstance(recorder, Recorder) else PATIENT_S
