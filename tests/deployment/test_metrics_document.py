"""docs/metrics.md has every metric, and docs/operations.md names none that does not exist."""

import re

from headrace.server.telemetry.catalog import CATALOG
from tests.deployment.files import ROOT
from tests.deployment.metrics_document import DOCUMENT, written

NAMES = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)


def test_the_document_is_that_of_the_code() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == written(), "python -m tests.deployment.metrics_document writes it"


def test_every_metric_is_in_it_once() -> None:
    page = written()
    for spec in CATALOG:
        labels = f"{{{','.join(spec.labels)}}}" if spec.labels else ""
        assert page.count(f"| `{spec.name}{labels}` |") == 1, spec.name


def test_the_main_ones_have_their_labels() -> None:
    """The table of operations.md."""
    specs = {spec.name: set(spec.labels) for spec in CATALOG}
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = text[text.index("| metric | tells |") : text.index("**Request log.**")]
    named = re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", " ".join(NAMES.findall(table)))
    assert len(named) > 30
    for name, labels in named:
        assert name in specs, name
        assert set(labels.split(",")) - {""} <= specs[name], name
