"""The Grafana dashboard and the alert rules ask for metrics and labels that /metrics has."""

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.gateway.metrics import OWN_CATALOG
from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.exposition import PREFIX, render
from tests.deployment.files import COMPOSE, DASHBOARD, NOT_ON_PANELS, ROOT, RULES, load_json, load_yaml, promtool

SCRAPED = {"instance", "job", "role"}  # labels that Prometheus adds (configs/prometheus.yml)
METRIC = re.compile(r"(?P<name>\bheadrace_\w+)(?:\{(?P<matchers>[^}]*)\})?")
SERVED = (*CATALOG, *OWN_CATALOG)  # by servers, and by gateways
PROVISIONING = ROOT / "configs/grafana/provisioning"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load_json(DASHBOARD)["panels"]
    return found


def queries_of(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel.get("targets", ())]


def dashboard_queries() -> Iterator[str]:
    dashboard = load_json(DASHBOARD)
    for panel in panels():
        yield from queries_of(panel)
    yield from (each["expr"] for each in dashboard["annotations"]["list"])
    yield from (each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query")


def alert_queries() -> Iterator[str]:
    yield from (rule["expr"] for group in load_yaml(RULES)["groups"] for rule in group["rules"])


QUERIES = sorted({*dashboard_queries(), *alert_queries()})


def known() -> dict[str, set[str]]:
    """Label names by sample name, for everything in /metrics of a server that has done nothing yet."""
    specs = {PREFIX + spec.name: spec for spec in SERVED}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render([], SERVED).decode()):
        counter = family.type == "counter"
        spec = specs[family.name + "_total" if counter else family.name]
        if family.type == "histogram":
            found |= {family.name + suffix: set(spec.labels) for suffix in ("_sum", "_count")}
            found[family.name + "_bucket"] = {*spec.labels, "le"}
        else:
            found[PREFIX + spec.name] = set(spec.labels)
    return found


KNOWN = known()
SPECS = {PREFIX + spec.name: spec for spec in SERVED}


@pytest.mark.parametrize("query", QUERIES)
def test_metrics_and_labels_exist(query: str) -> None:
    offered = set(SCRAPED)
    for match in METRIC.finditer(query):
        assert match["name"] in KNOWN, f"no metric is called {match['name']}"
        labels = KNOWN[match["name"]] | SCRAPED
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match["matchers"] or ""):
            assert label in labels, f"{match['name']} has no label {label}"
        offered |= labels
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= offered, query


def test_metrics_are_on_a_panel_or_there_is_a_reason_why_not() -> None:
    shown = {match["name"] for panel in panels() for query in queries_of(panel) for match in METRIC.finditer(query)}
    names = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in SPECS else name for name in shown}
    reasons = load_yaml(NOT_ON_PANELS)
    assert all(reasons.values())
    missing = {PREFIX + name for name in reasons} | names
    assert missing == set(SPECS), "each metric is on a panel or in configs/grafana/not_on_panels.yml"
    assert not {PREFIX + name for name in reasons} & names, "it is on a panel"


def test_no_panel_mixes_the_two_servers_of_a_pair() -> None:
    """Both count a request, its tokens and its time: what is added up, or put into quantiles, is of one side of it."""
    for panel in panels():
        for query in queries_of(panel):
            selected = list(METRIC.finditer(query))
            roles = [re.search(r'role=~"([a-z|]+)"', match["matchers"] or "") for match in selected]
            assert selected, query
            assert all(roles), f"{panel['title']}: each metric needs the roles that it is of"
            for match, role in zip(selected, roles, strict=True):
                assert role is not None
                both = {"prefill", "decode"} <= set(role[1].split("|"))
                grouped = re.findall(r"\bby \(([^)]*)\)", query)
                by_role = all({"role", "instance"} & set(group.split(", ")) for group in grouped)
                alone = "sum(" not in query and by_role
                by_phase = 'phase=~"$phase"' in query  # those of the two servers are others
                assert not both or alone or by_phase, f"{panel['title']}: {match['name']} of both servers is added up"


def test_legends_use_labels_of_their_query() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            kept = {
                label.strip() for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in group.split(",")
            }
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= (kept if " by (" in target["expr"] else SCRAPED), target


def test_queries_are_promql(tmp_path: Path) -> None:
    """promtool reads them as recording rules, with Grafana's variables filled in."""
    filled = [
        re.sub(r"\$__\w+", "5m", query).replace("$instance", ".*").replace("$phase", ".*").replace("$objective", "1")
        for query in QUERIES
        if not query.startswith("label_values(")
    ]
    rules = [{"record": f"check:{number}", "expr": query} for number, query in enumerate(filled)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_panels_have_their_own_place_and_number() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    cells: dict[int, set[tuple[int, int]]] = {}
    for panel in panels():
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24, panel["title"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells[panel["id"]] = {(x, y) for x in columns for y in rows}
    for first, second in combinations(cells, 2):
        assert not cells[first] & cells[second]


def test_panels_say_what_they_show() -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]


def test_variables_are_used_and_declared() -> None:
    declared = {each["name"] for each in load_json(DASHBOARD)["templating"]["list"]}
    text = DASHBOARD.read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{?([a-z]+)\b", text))
    assert used == declared


def test_objectives_are_bucket_bounds_of_the_time_to_first_token() -> None:
    """Else no bucket would be found, and the goodput panel would be empty."""
    (variable,) = (each for each in load_json(DASHBOARD)["templating"]["list"] if each["name"] == "objective")
    (spec,) = (spec for spec in CATALOG if spec.name == "time_to_first_token_seconds")
    choices = [float(choice) for choice in variable["query"].split(",")]
    assert set(choices) <= set(spec.bounds)
    assert [float(option["value"]) for option in variable["options"]] == choices
    assert float(variable["current"]["value"]) in choices


def test_provisioning_points_to_the_dashboard_and_the_prometheus_of_the_compose_file() -> None:
    services = load_yaml(COMPOSE)["services"]
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    (provider,) = load_yaml(PROVISIONING / "dashboards/headrace.yml")["providers"]
    assert provider["options"]["path"] == mounts["./configs/grafana/dashboards"]
    (source,) = load_yaml(PROVISIONING / "datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in services["prometheus"]["ports"]
    choices = load_json(DASHBOARD)["templating"]["list"]
    (chosen,) = (each["current"]["value"] for each in choices if each["type"] == "datasource")
    assert chosen == source["uid"]
