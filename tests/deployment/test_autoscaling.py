"""The manifests by which autoscalers add prefill servers: they ask for metrics and labels that /metrics has."""

import re
from typing import Any

import pytest
import yaml

from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.exposition import PREFIX
from tests.deployment.files import ROOT, load_yaml
from tests.deployment.manifests import named

FOLDER = ROOT / "configs/autoscaling"
FORECAST = PREFIX + "forecast_queue_seconds"


def manifest(name: str) -> Any:
    return load_yaml(FOLDER / name)


@pytest.mark.parametrize("name", ["keda.yaml", "external-metric.yaml"])
def test_scales_the_prefill_servers_of_the_manifests(name: str) -> None:
    target = manifest(name)["spec"]["scaleTargetRef"]
    pair = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/pair.yaml").read_text()))
    found = named(pair, target["kind"], target["name"])
    assert found["apiVersion"] == target["apiVersion"]


def labels_of(query: str) -> dict[str, str]:
    (name, matchers) = re.fullmatch(r"sum\((\w+)\{(.*)\}\)", query).groups()  # type: ignore[union-attr]
    assert name == FORECAST
    return dict(re.findall(r'(\w+)="([^"]*)"', matchers))


def asked() -> list[dict[str, str]]:
    (trigger,) = manifest("keda.yaml")["spec"]["triggers"]
    (metric,) = manifest("external-metric.yaml")["spec"]["metrics"]
    external = metric["external"]
    assert external["metric"]["name"] == FORECAST
    assert external["target"] == {"type": "AverageValue", "averageValue": trigger["metadata"]["threshold"]}
    assert trigger["type"] == "prometheus"
    assert trigger["metricType"] == "AverageValue"
    return [labels_of(trigger["metadata"]["query"]), external["metric"]["selector"]["matchLabels"]]


def test_both_ask_for_the_same_and_it_is_served() -> None:
    keda, external = asked()
    assert keda == external
    spec = next(spec for spec in CATALOG if PREFIX + spec.name == FORECAST)
    assert set(keda) == {*spec.labels, "role"}, "role is added by configs/prometheus.yml"


def test_the_adapter_serves_the_metric_that_is_asked_for() -> None:
    (rule,) = manifest("prometheus-adapter.yml")["externalRules"]
    assert rule["seriesQuery"].startswith(FORECAST)
    assert rule["name"] == {"as": FORECAST}
    assert rule["metricsQuery"] == "sum(<<.Series>>{<<.LabelMatchers>>})", "the selector chooses among the series"
