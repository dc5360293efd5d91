"""docs/metrics.md, made from the catalog and the dashboard: python -m tests.deployment.metrics_document writes it."""

import re
from collections.abc import Iterator

from headrace.core.stats import MetricSpec
from headrace.gateway import metrics as gateway
from headrace.server.telemetry import catalog
from headrace.server.telemetry.exposition import PREFIX
from tests.deployment.files import DASHBOARD, NOT_ON_PANELS, ROOT, load_json, load_yaml

DOCUMENT = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

`GET /metrics` of every server, as Prometheus reads it. Names have the prefix `headrace_`, which is left out below;
times are in seconds, sizes in bytes. Series whose labels are known are there with 0 from the start, so that `rate()`
sees the first event, too. Prometheus adds `instance`, and `role` by `configs/prometheus.yml`: both servers of a pair
count a request, its tokens and its times, so that their series are not to be added up. What clients see is counted at
decode and colocated servers. [operations.md](operations.md#health-readiness-metrics) says which to look at first.

This page is made from the code (`python -m tests.deployment.metrics_document`). The last column has the panels of
`configs/grafana/dashboards/headrace.json`, or why there is none.
"""
PARTS: dict[str, tuple[MetricSpec, ...]] = {
    "Requests and HTTP (front end)": catalog.FRONT,
    "Scheduler": catalog.SCHEDULER,
    "Stages": catalog.STAGES,
    "Handoff": catalog.TRANSFER,
    "Connections": catalog.CONNECTIONS,
    "KV events": catalog.KV_EVENTS,
    "Processes": catalog.PROCESSES,
}
NO_PANEL = "the dashboard is of servers"
GATEWAY = "Gateways (headrace gateway), besides those of HTTP, `kv_pages` and `prefill_servers_up`"


def written() -> str:
    """The whole document."""
    listed = {spec.name for specs in PARTS.values() for spec in specs}
    others = tuple(spec for spec in catalog.CATALOG if spec.name not in listed)
    parts = {**PARTS, **({"Others": others} if others else {}), GATEWAY: gateway.OWN_CATALOG}
    return "\n".join([HEAD, *(line for title, specs in parts.items() for line in _table(title, specs))])


def panels_of(name: str) -> list[str]:
    """Titles of the panels that show a metric."""
    pattern = re.compile(rf"\b{PREFIX}{name}(_bucket|_sum|_count)?\b")
    panels = load_json(DASHBOARD)["panels"]
    return [
        panel["title"] for panel in panels if any(pattern.search(each["expr"]) for each in panel.get("targets", ()))
    ]


def _table(title: str, specs: tuple[MetricSpec, ...]) -> Iterator[str]:
    reasons = load_yaml(NOT_ON_PANELS)
    yield f"## {title}\n"
    yield "| metric | kind | what it counts | panel |"
    yield "|---|---|---|---|"
    for spec in specs:
        labels = f"{{{','.join(spec.labels)}}}" if spec.labels else ""
        panels = "; ".join(panels_of(spec.name)) or f"none: {reasons.get(spec.name, NO_PANEL)}"
        yield f"| `{spec.name}{labels}` | {spec.kind} | {spec.help} | {panels} |"
    yield ""


if __name__ == "__main__":
    DOCUMENT.write_text(written(), encoding="utf-8")
