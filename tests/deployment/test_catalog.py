"""What the code counts and what the catalog describes are the same."""

import ast
from collections.abc import Iterator
from pathlib import Path

from headrace.server.telemetry.catalog import CATALOG
from tests.deployment.files import ROOT

PACKAGES = ("core", "scheduler", "transfer", "engine", "server")
COUNTING = ("add", "observe")  # methods of headrace.core.stats.Counters and Histograms
SAMPLES = ("Sample", "HistogramSample")


def counted(path: Path) -> Iterator[str]:
    """Metric names that a file passes to a counter, a histogram or a sample."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
            continue
        name = node.args[0].value
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(name, str) and (method in COUNTING or function in SAMPLES):
            yield name


def test_names_agree() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    in_code = {name for path in paths for name in counted(path)}
    described = [spec.name for spec in CATALOG]
    assert len(described) == len(set(described)), "a metric is described twice"
    assert in_code - set(described) == set(), "counted and not described"
    assert set(described) - in_code == set(), "described and never counted"


def test_names_follow_the_conventions() -> None:
    for spec in CATALOG:
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.help.endswith("."), spec.name
        assert all(len(values) == len(spec.labels) for values in spec.zeros), spec.name
        assert not spec.name.endswith(("_ms", "_milliseconds", "_kb", "_mb")), f"{spec.name}: base units"
