"""What the code counts and what the catalog describes are the same."""

import ast
from collections.abc import Iterator
from pathlib import Path

from headrace.gateway.metrics import OWN_CATALOG, PREFIX
from headrace.scheduler.telemetry.metrics import DROPPED
from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.label_values import MISMATCHES
from tests.deployment.files import PACKAGES, ROOT

COUNTING = ("add", "observe")  # methods of headrace.core.stats.Counters and Histograms
SAMPLES = ("Sample", "HistogramSample")
PREFIXED = ("gateway/vllm_nixl", "gateway/sglang_nixl")  # the gateway puts its prefix before their names


def counted(path: Path) -> Iterator[str]:
    """Metric names that a file passes to a counter, a histogram or a sample, as the catalog has them."""
    prefix = PREFIX if str(path.parent.relative_to(ROOT)) in PREFIXED else ""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
            continue
        name = node.args[0].value
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(name, str) and (method in COUNTING or function in SAMPLES):
            yield f"{prefix}{name}"


def test_names_agree() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    in_code = {name for path in paths for name in counted(path)}
    described = [spec.name for spec in (*CATALOG, *OWN_CATALOG)]
    assert len(described) == len(set(described)), "a metric is described twice"
    assert in_code - set(described) == set(), "counted and not described"
    assert set(described) - in_code == set(), "described and never counted"


def label_sets(path: Path) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Names of counters, and the labels that a file gives them; None for what is no constant."""
    prefix = PREFIX if str(path.parent.relative_to(ROOT)) in PREFIXED else ""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add"):
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "labels"] or node.args[2:3]
        if given and isinstance(given[0], ast.Tuple) and isinstance(node.args[0], ast.Constant):
            labels = given[0].elts
            yield (
                f"{prefix}{node.args[0].value}",
                tuple(str(one.value) if isinstance(one, ast.Constant) else None for one in labels),
            )


def test_constant_labels_are_there_from_the_start() -> None:
    """Else rate() would not see the first event."""
    specs = {spec.name: spec for spec in (*CATALOG, *OWN_CATALOG)}
    found = [each for package in PACKAGES for path in (ROOT / package).rglob("*.py") for each in label_sets(path)]
    assert len(found) > 30, "the search finds too little"
    for name, labels in found:
        if any(labels):
            known = specs[name].zeros
            matching = [zero for zero in known if all(a in (None, b) for a, b in zip(labels, zero, strict=True))]
            assert matching, f"{name}{labels} is not among its zeros"


def test_dropped_messages_and_hellos_that_do_not_fit_are_listed() -> None:
    """Their reasons go through a method each."""
    dropped = {
        str(node.args[0].value)
        for path in (ROOT / "scheduler").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "drop"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert dropped == set(DROPPED)
    tree = ast.parse((ROOT / "transfer/protocol/matching.py").read_text(encoding="utf-8"))
    fields = {
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mismatch"
        if isinstance(node.args[0], ast.Constant)
    }
    looped = {
        str(one.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple)
        for one in node.iter.elts
        if isinstance(one, ast.Constant)
    }
    assert {f"{field}_mismatch" for field in fields | looped} == set(MISMATCHES)


def test_names_follow_the_conventions() -> None:
    for spec in (*CATALOG, *OWN_CATALOG):
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.help.endswith("."), spec.name
        assert all(len(values) == len(spec.labels) for values in spec.zeros), spec.name
        assert not spec.name.endswith(("_ms", "_milliseconds", "_kb", "_mb")), f"{spec.name}: base units"
