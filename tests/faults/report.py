"""The table of docs/reliability.md: written from results, read back to compare it with the matrix."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.faults.cells import Cell, NotApplicable, Proven, Struck
from tests.faults.load import RIGHT
from tests.faults.phases import PHASES
from tests.faults.runner import Result
from tests.faults.table import GROUPS

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- begin: results of make faults -->", "<!-- end: results of make faults -->"
NOT_RUN = "not run"
AT_ONCE, ONE_BY_ONE, LOADED, SLOW = "at once", "one by one", "loaded only", "too fast"

Key = tuple[str, str, str]  # fault, place, phase; for tests elsewhere the name of the test in the place of the phase


def summary(result: Result) -> str:
    """A cell: seconds to recover, requests that were answered, those that failed."""
    right = result.outcomes[RIGHT]
    return f"{result.recovery_s:.1f} s, {right} + {result.outcomes.total() - right}"


def cells_with_results() -> list[Key]:
    """Every cell of the tables that has a result, in order."""
    return [
        (fault.name, place, column)
        for group in GROUPS
        for fault in group.faults
        for place, cell in fault.cells.items()
        for column in _columns(cell)
    ]


def parse(document: str) -> dict[Key, str]:
    """The results that a document has."""
    found: dict[Key, str] = {}
    for line in document.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 2 + len(PHASES) and cells[0] not in ("fault", "---"):
            for phase, text in zip(PHASES, cells[2:], strict=True):
                if text not in (AT_ONCE, ONE_BY_ONE, LOADED, SLOW):
                    found[cells[0], cells[1], phase] = text
        elif len(cells) == 4 and cells[2].startswith("`tests/"):
            for place in cells[1].split(", "):
                found[cells[0], place, cells[2].strip("`")] = cells[3]
    return found


def excuses(document: str) -> dict[tuple[str, str], str]:
    """Why faults do not apply, by fault and place."""
    found = {}
    for line in document.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 3 and cells[0] not in ("fault", "---"):
            found.update({(cells[0], place): cells[2] for place in cells[1].split(", ")})
    return found


def render(results: Mapping[Key, str]) -> str:
    """All tables."""
    lines: list[str] = []
    for group in GROUPS:
        lines += [f"### {group.title}", ""]
        lines += [f"- **{fault.name}**: {fault.how}" for fault in group.faults]
        rows = [
            [fault.name, place, *(_shown(cell, phase, results.get((fault.name, place, phase))) for phase in PHASES)]
            for fault in group.faults
            for place, cell in fault.cells.items()
            if isinstance(cell, Struck)
        ]
        lines += _table(["fault", "where", *PHASES], rows)
    lines += ["### Shown by other tests", "", "`make faults` runs them, too."]
    lines += _table(["fault", "where", "test", "result"], _proven(results))
    lines += ["### Not applicable"]
    lines += _table(["fault", "where", "why"], _excused())
    return "\n".join(lines).rstrip() + "\n"


def write(results: Mapping[Key, str]) -> None:
    """Put results into the document; cells that have none keep what they had."""
    document = DOCUMENT.read_text(encoding="utf-8")
    merged = {**parse(document), **results}
    before, _, rest = document.partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{render(merged)}\n{END}{after}", encoding="utf-8")


def _columns(cell: Cell) -> list[str]:
    if isinstance(cell, Struck):
        return list(cell.phases)
    return list(cell.tests) if isinstance(cell, Proven) else []


def _shown(cell: Struck, phase: str, result: str | None) -> str:
    if phase in cell.phases:
        return result or NOT_RUN
    if phase == "idle":
        return LOADED
    if "all at once" in cell.phases:
        return AT_ONCE
    return ONE_BY_ONE if "waiting" in cell.phases else SLOW


def _proven(results: Mapping[Key, str]) -> list[list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    found: dict[tuple[str, str], str] = {}
    for fault, place, test in cells_with_results():
        if test not in PHASES:
            rows.setdefault((fault, test), []).append(place)
            found[fault, test] = results.get((fault, place, test), NOT_RUN)
    return [[fault, ", ".join(places), f"`{test}`", found[fault, test]] for (fault, test), places in rows.items()]


def _excused() -> list[list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for group in GROUPS:
        for fault in group.faults:
            for place, cell in fault.cells.items():
                if isinstance(cell, NotApplicable):
                    rows.setdefault((fault.name, cell.why), []).append(place)
    return [[fault, ", ".join(places), why] for (fault, why), places in rows.items()]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    assert all(not re.search(r"\|", cell) for line in lines for cell in line)
    return ["", *(f"| {' | '.join(line)} |" for line in lines), ""]
