"""The plain manifests: flags are the server's, ports and names fit, drains fit, pods are confined."""

import argparse
import shutil
import subprocess
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from headrace.server.config.flags import add_flags
from headrace.server.stage_group import rank_info
from tests.deployment.files import ROOT, load_yaml
from tests.deployment.manifests import Object, configuration, containers, named, pods

FOLDER = ROOT / "deploy/kubernetes"
NAMES = ("pair.yaml", "ranks.yaml")


@pytest.fixture(scope="module", params=NAMES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / request.param).read_text()))


def servers(objects: list[Object]) -> dict[str, Object]:
    return {configuration(each).server.role: each for each in containers(objects, "server")}


def test_flags_and_environment_make_configurations(objects: list[Object]) -> None:
    found = servers(objects)
    assert set(found) == {"prefill", "decode"}
    for container in found.values():
        config = configuration(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == config.server.port
        assert config.server.api_keys == ("a-key",)
        assert "shm" not in config.transfer.backends, "pods do not share /dev/shm"


def test_decode_finds_the_prefill_servers_by_name(objects: list[Object]) -> None:
    """POD.SERVICE: a StatefulSet's headless service; a LeaderWorkerSet makes one of its own name."""
    urls = configuration(servers(objects)["decode"]).server.prefill
    (workload,) = [
        each
        for each in objects
        if each["kind"] in ("StatefulSet", "LeaderWorkerSet") and each["metadata"]["name"].endswith("-prefill")
    ]
    name = workload["metadata"]["name"]
    assert [urlsplit(url).hostname for url in urls] == [
        f"{name}-{number}.{name}" for number in range(workload["spec"]["replicas"])
    ]
    port = configuration(servers(objects)["prefill"]).server.port
    assert {urlsplit(url).port for url in urls} == {port}
    if workload["kind"] == "StatefulSet":
        service = named(objects, "Service", name)
        assert workload["spec"]["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"], "decode servers ask for readiness themselves"


def test_selectors_find_their_pods(objects: list[Object]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(objects)]
    for each in objects:
        if each["kind"] == "Service":
            selector = each["spec"]["selector"].items()
            assert any(selector <= found.items() for found in labels), each["metadata"]["name"]
        if each["kind"] == "StatefulSet":
            assert (
                each["spec"]["selector"]["matchLabels"].items()
                <= each["spec"]["template"]["metadata"]["labels"].items()
            )


def test_a_drain_fits_into_the_grace_period(objects: list[Object]) -> None:
    for pod in pods(objects):
        for container in pod["spec"]["containers"]:
            if container["name"] != "server":
                continue
            program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            assert program == "sleep"
            drain = configuration(container).server.drain_timeout_s
            assert pod["spec"]["terminationGracePeriodSeconds"] >= int(seconds) + drain + 10


def test_ranks_outlive_the_drain_of_their_server() -> None:
    """All containers of a group are told to end at once; the ranks must not end before the server has drained."""
    leader, worker, _ = pods(list(yaml.safe_load_all((FOLDER / "ranks.yaml").read_text())))
    assert worker["spec"]["terminationGracePeriodSeconds"] >= leader["spec"]["terminationGracePeriodSeconds"]
    server = next(each for each in leader["spec"]["containers"] if each["name"] == "server")
    least = int(server["lifecycle"]["preStop"]["exec"]["command"][1]) + configuration(server).server.drain_timeout_s
    for rank in (*leader["spec"]["containers"], *worker["spec"]["containers"]):
        if rank["name"] == "rank":
            program, seconds = rank["lifecycle"]["preStop"]["exec"]["command"]
            assert (program, int(seconds)) == ("sleep", least)


def test_probes(objects: list[Object]) -> None:
    for container in containers(objects, "server"):
        paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {name: probe["path"] for name, probe in paths.items()} == {
            "startupProbe": "/health",
            "livenessProbe": "/health",
            "readinessProbe": "/ready",
        }
        assert {probe["port"] for probe in paths.values()} == {"http"}
        assert container["livenessProbe"]["timeoutSeconds"] > 5, "/health answers after 5 s that the scheduler does not"


def test_pods_are_confined(objects: list[Object]) -> None:
    for pod in pods(objects):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "a service named headrace would set HEADRACE_PORT"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/models", "/tmp"}
        for volume in spec["volumes"]:
            assert volume.get("emptyDir") is None or volume["emptyDir"]["sizeLimit"], volume["name"]
    user = spec["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in (ROOT / "Dockerfile").read_text()


def test_not_every_pod_may_ask_a_decode_server(objects: list[Object]) -> None:
    for rule in named(objects, "NetworkPolicy", "-decode")["spec"]["ingress"]:
        for peer in rule["from"]:
            assert any(peer.get(kind) for kind in ("podSelector", "namespaceSelector", "ipBlock")), "everybody"


def test_ranks_join_their_server() -> None:
    objects = list(yaml.safe_load_all((FOLDER / "ranks.yaml").read_text()))
    server = configuration(servers(objects)["prefill"])
    group = named(objects, "LeaderWorkerSet", "-prefill")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == server.scheduler.stages * server.scheduler.tp * server.scheduler.dp
    assert group["restartPolicy"] == "None", "ranks are started again in their pods"
    ranks = containers(objects, "rank")
    assert len(ranks) == 2
    for rank in ranks:
        command, *flags = rank["args"]
        assert command == "stage"
        parser = argparse.ArgumentParser(exit_on_error=False)
        rank_info.add_flags(parser)
        given = parser.parse_args(flags)
        assert given.scheduler == f"tcp://$(LWS_LEADER_ADDRESS):{server.group.port}"
        assert given.transfer_host == "$(POD_IP)"
        assert "POD_IP" in [each["name"] for each in rank["env"]]
    environ = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": str(group["size"]), "LWS_LEADER_ADDRESS": "leader.set"}
    found = rank_info.read_rank_info(vars(given), environ)
    assert (found.rank, found.world_size) == (1, 2)


def ports_from(policy: Object, component: str) -> set[int] | None:
    """Ports that pods of a component may reach; None for all."""
    found: set[int] = set()
    for rule in policy["spec"]["ingress"]:
        for source in rule["from"]:
            selector = source.get("podSelector", {})
            components = {selector.get("matchLabels", {}).get("app.kubernetes.io/component")}
            for each in selector.get("matchExpressions", []):
                components |= set(each["values"])
            if component in components:
                if "ports" not in rule:
                    return None
                found |= {port["port"] for port in rule["ports"]}
    return found


def test_kv_ports_are_reached_by_decode_servers_alone(objects: list[Object]) -> None:
    policy = named(objects, "NetworkPolicy", "-prefill")
    prefill = configuration(servers(objects)["prefill"])
    transfer = prefill.transfer
    assert ports_from(policy, "decode") == {prefill.server.port, transfer.control_port, transfer.data_port}
    private = {transfer.control_port, transfer.data_port}
    for rule in policy["spec"]["ingress"]:
        others = [source for source in rule["from"] if "namespaceSelector" in source]
        assert not others or {port["port"] for port in rule["ports"]}.isdisjoint(private)
    ranks = prefill.group.port
    assert (ports_from(policy, "rank") is None) == bool(ranks), "ranks talk among themselves on many ports"


def test_the_kustomization_names_what_is_there() -> None:
    made = load_yaml(FOLDER / "kustomization.yaml")
    assert all((FOLDER / name).exists() for name in made["resources"])
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl, which has kustomize, is not installed")
    done = subprocess.run([program, "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {each["metadata"]["namespace"] for each in yaml.safe_load_all(done.stdout)} == {"headrace"}


def test_every_flag_is_known() -> None:
    """parse_args() above would end the test run for one that is not; here it has its name."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    known: set[Any] = {option for action in parser._actions for option in action.option_strings}
    for name in NAMES:
        for container in containers(list(yaml.safe_load_all((FOLDER / name).read_text())), "server"):
            assert {flag.partition("=")[0] for flag in container["args"][1:]} <= known
