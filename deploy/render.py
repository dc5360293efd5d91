"""Renders the chart of deploy/helm into the plain manifests of deploy/kubernetes (make manifests).

Needs helm-python-sdk, Helm's own library, from requirements/charts.txt.
"""

import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

HERE = Path(__file__).resolve().parent
CHART = HERE / "helm" / "headrace"
NAME = NAMESPACE = "headrace"
PLAIN: dict[str, Any] = {"auth": {"existingSecret": "headrace-keys"}, "dashboards": {"enabled": False}}
MANIFESTS: dict[str, dict[str, Any]] = {
    "pair.yaml": PLAIN,
    "ranks.yaml": {**PLAIN, "dtype": "bfloat16", "prefill": {"ranks": 2, "extraArgs": ["--pp=2"]}},
}
HEADS = {
    "pair.yaml": "A prefill and a decode server.",
    "ranks.yaml": "A prefill server with two pipeline stages, a pod each (needs LeaderWorkerSet), and a decode server.",
}
OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of the chart with these values, in the order of their templates. Raises HelmError."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=NAME, namespace=NAMESPACE)
    objects = []
    for path, text in sorted(files.items()):
        if path.endswith(".yaml"):
            objects += [found for found in yaml.safe_load_all(text) if found]
    return objects


def manifest(name: str) -> str:
    """The text of a plain manifest."""
    head = f"# {HEADS[name]}\n# Made from deploy/helm by `make manifests`; change it there, or with an overlay.\n"
    objects = [_without_helm(each) for each in render(MANIFESTS[name])]
    return head + yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=120)


def _without_helm(found: Any) -> Any:
    """The object without the labels by which Helm knows its own."""
    if isinstance(found, dict):
        return {key: _without_helm(value) for key, value in found.items() if key not in OF_HELM}
    return [_without_helm(item) for item in found] if isinstance(found, list) else found


if __name__ == "__main__":
    for name in MANIFESTS:
        (HERE / "kubernetes" / name).write_text(manifest(name), encoding="utf-8")
        print(f"deploy/kubernetes/{name}", file=sys.stderr)
