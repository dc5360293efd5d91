"""The dashboard is read by Grafana's own data model (grafana-foundation-sdk), which skips what it does not know."""

import json
from typing import Any

import pytest

from tests.deployment.files import DASHBOARD, load_json

SDK = "grafana_foundation_sdk"
pytest.importorskip(SDK, reason="make test-charts has Grafana's data model")
dashboards = pytest.importorskip(f"{SDK}.models.dashboard")
encoder, plugins = (pytest.importorskip(f"{SDK}.cog.{name}") for name in ("encoder", "plugins"))

pytestmark = pytest.mark.charts

OF_PLUGINS = {
    ".annotations.list[].titleFormat": "of annotations from Prometheus, which the model does not have",
    ".templating.list[].definition": "what Grafana shows of a query in the list of variables",
}


def lost(given: Any, read: Any, path: str = "") -> set[str]:
    """Where what was read differs from what was given; what was added by default does not count."""
    if isinstance(given, dict) and isinstance(read, dict):
        missing = {f"{path}.{key}" for key in given if key not in read}
        return missing.union(*(lost(given[key], read[key], f"{path}.{key}") for key in given if key in read))
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return set[str]().union(*(lost(one, other, f"{path}[]") for one, other in zip(given, read, strict=True)))
    return set() if given == read else {path}


def read(dashboard: Any) -> Any:
    """A dashboard through the model, with the panels' and data sources' own options."""
    plugins.register_default_plugins()
    return json.loads(encoder.JSONEncoder().encode(dashboards.Dashboard.from_json(dashboard)))


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    given = load_json(DASHBOARD)
    assert lost(given, read(given)) == set(OF_PLUGINS)


@pytest.mark.parametrize("where", ["panels", "targets", "options"])
def test_a_misspelt_field_would_be_found(where: str) -> None:
    given = load_json(DASHBOARD)
    panel = given["panels"][1]
    target = {"panels": panel, "targets": panel["targets"][0], "options": panel["options"]}[where]
    target["expresion"] = "up"
    assert any(path.endswith(".expresion") for path in lost(given, read(given)))
