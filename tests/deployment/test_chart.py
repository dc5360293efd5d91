"""The Helm chart, rendered by Helm itself: it lints, follows Kubernetes' schemas, refuses what cannot work."""

import json
from typing import Any

import pytest

from tests.deployment.files import DASHBOARD, ROOT, load_json, load_yaml
from tests.deployment.manifests import Object, configuration, containers, named, pods

pytest.importorskip("helm_python", reason="make test-charts has Helm's library")
from deploy import render

pytestmark = pytest.mark.charts
KEY = {"auth": {"apiKey": "a-key"}}
EVERYTHING: dict[str, Any] = {
    **KEY,
    "dtype": "bfloat16",
    "prefill": {"replicas": 3, "ranks": 4, "extraArgs": ["--pp=2", "--tp=2"], "bootstrapPort": 8998},
    "decode": {"replicas": 2, "nodeSelector": {"pool": "decode"}, "tolerations": [{"operator": "Exists"}]},
    "router": {"enabled": True, "image": "router:1"},
    "models": {"existingClaim": "models", "readOnly": True},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "imagePullSecrets": [{"name": "registry"}],
}
VALUES = {"a pair": KEY, "everything": EVERYTHING, "an existing secret": render.PLAIN}
VERSIONS = ("1.28", "1.32", "1.37")
GROUP_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}  # of those that LeaderWorkerSet has
OF_OPERATORS = ("PodMonitor", "PrometheusRule", "LeaderWorkerSet")  # Kubernetes has no schema for them


@pytest.fixture(scope="module", params=VALUES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render.render(VALUES[request.param])


def test_helm_lints_it() -> None:
    import helm_python

    found = helm_python.lint(str(render.CHART), values=KEY)
    worse = [message for message in found["messages"] if message["severity"] > 1]
    assert not worse
    assert not found["errors"]


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_follow_the_schemas_of_kubernetes(objects: list[Object], version: str) -> None:
    import kubernetes_validate

    for each in objects:
        if each["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(each, version, strict=True)
    for pod in pods(objects):  # also those of a LeaderWorkerSet
        labels = pod["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": pod}
        wrapped = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(wrapped, version, strict=True)


def test_the_schemas_find_a_mistake() -> None:
    import kubernetes_validate

    wrong = named(render.render(KEY), "StatefulSet", "-prefill")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_a_group_has_the_fields_of_a_leader_worker_set() -> None:
    group = named(render.render(EVERYTHING), "LeaderWorkerSet", "-prefill")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(group["spec"]) == {"replicas", "startupPolicy", "leaderWorkerTemplate"}
    assert set(group["spec"]["leaderWorkerTemplate"]) == GROUP_FIELDS


def test_every_server_has_a_configuration(objects: list[Object]) -> None:
    for container in containers(objects, "server"):
        assert configuration(container).server.api_keys == ("a-key",)


def test_a_router_names_all_servers() -> None:
    objects = render.render(EVERYTHING)
    (router,) = containers(objects, "router")
    words = router["args"]
    prefill = [words[at + 1] for at, word in enumerate(words) if word == "--prefill"]
    decode = [words[at + 1] for at, word in enumerate(words) if word == "--decode"]
    assert prefill == [f"http://headrace-prefill-{number}.headrace-prefill:8000" for number in range(3)]
    assert decode == [f"http://headrace-decode-{number}.headrace-decode:8000" for number in range(2)]
    (api,) = [each for each in objects if each["kind"] == "Service" and each["metadata"]["name"] == "headrace"]
    assert api["spec"]["selector"]["app.kubernetes.io/component"] == "router"


def test_dashboards_and_alerts_are_those_of_configs() -> None:
    objects = render.render(EVERYTHING)
    data = named(objects, "ConfigMap", "-dashboards")["data"]
    assert set(data) == {path.name for path in DASHBOARD.parent.glob("*.json")}
    assert json.loads(data[DASHBOARD.name]) == load_json(DASHBOARD)
    assert named(objects, "PrometheusRule", "headrace")["spec"] == load_yaml(ROOT / "configs/rules/headrace.yml")


def test_a_read_only_model_volume_leaves_a_cache() -> None:
    for container in containers(render.render(EVERYTHING), "server"):
        cache = {each["name"]: each.get("value") for each in container["env"]}["XDG_CACHE_HOME"]
        assert cache in [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "set auth.apiKey"),
        ({**KEY, "networkPolicy": {"enabled": False}}, "every pod reaches the KV ports"),
        ({**KEY, "prefill": {"ranks": 2}}, "needs dtype"),
        ({**KEY, "router": {"enabled": True}}, "router.image"),
        ({**KEY, "dtype": "float8"}, "dtype"),
        ({**KEY, "drainTimeout": 0}, "drainTimeout"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match=message):
        render.render(values)


@pytest.mark.parametrize("name", render.MANIFESTS)
def test_plain_manifests_are_those_of_the_chart(name: str) -> None:
    text = (ROOT / "deploy/kubernetes" / name).read_text()
    assert text == render.manifest(name), f"deploy/kubernetes/{name} is old: run make manifests"
