"""Prometheus' configuration and the alert rules."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deployment.files import ALERTMANAGER, COMPOSE, PROMETHEUS, ROOT, RULES, load_yaml, promtool


def rules() -> list[dict[str, Any]]:
    return [rule for group in load_yaml(RULES)["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", ["prometheus", "prometheus-local"])
def test_configuration_is_valid(name: str) -> None:
    promtool("check", "config", f"configs/{name}.yml")


def test_the_local_one_is_the_same_but_for_the_servers() -> None:
    """Which are those of the README."""
    text = PROMETHEUS.with_stem("prometheus-local").read_text().replace("127.0.0.1:8000", "prefill:8000")
    assert yaml.safe_load(text.replace("127.0.0.1:8001", "decode:8000")) == load_yaml(PROMETHEUS)


def test_rules_are_valid() -> None:
    promtool("check", "rules", "configs/rules/headrace.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "tests/deployment/alerts_test.yml")


def test_every_alert_is_tested_and_says_what_is_wrong() -> None:
    tested = set(re.findall(r"Headrace\w+", (ROOT / "tests/deployment/alerts_test.yml").read_text()))
    assert {rule["alert"] for rule in rules()} == tested
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_every_alert_leads_to_its_heading_in_the_runbook() -> None:
    for rule in rules():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert [heading for heading in headings if heading.lower() == anchor] == [rule["alert"]]


def test_scrapes_the_servers_of_the_compose_file() -> None:
    services = load_yaml(COMPOSE)["services"]
    (job,) = (job for job in load_yaml(PROMETHEUS)["scrape_configs"] if job["job_name"] == "headrace")
    scraped = {(target, each["labels"]["role"]) for each in job["static_configs"] for target in each["targets"]}
    flags = {
        name: dict(re.findall(r"--(\w+)=(\S+)", " ".join(services[name]["command"]))) for name in ("prefill", "decode")
    }
    assert scraped == {(f"{name}:{flag['port']}", flag["role"]) for name, flag in flags.items()}


def test_rule_files_are_mounted_where_the_configuration_looks() -> None:
    (pattern,) = load_yaml(PROMETHEUS)["rule_files"]
    assert RULES in set(PROMETHEUS.parent.glob(pattern))
    mounts = dict(mount.split(":")[:2] for mount in load_yaml(COMPOSE)["services"]["prometheus"]["volumes"])
    assert mounts["./configs/rules"] == "/etc/prometheus/" + pattern.split("/")[0]


def test_alerts_have_the_servers_that_are_scraped_write_recordings() -> None:
    document = load_yaml(ALERTMANAGER)
    receivers = {each["name"]: each.get("webhook_configs", []) for each in document["receivers"]}
    (route,) = document["route"]["routes"]
    assert {document["route"]["receiver"], route["receiver"]} == set(receivers)
    assert route["continue"], "those who are paged come after it"
    name, pattern = re.fullmatch(r'(\w+)=~"(.+)"', route["matchers"][0]).groups()  # type: ignore[union-attr]
    assert name == "alertname"
    assert all(re.fullmatch(pattern, rule["alert"]) for rule in rules())
    (job,) = (job for job in load_yaml(PROMETHEUS)["scrape_configs"] if job["job_name"] == "headrace")
    targets = [target for each in job["static_configs"] for target in each["targets"]]
    webhooks = receivers[route["receiver"]]
    assert [each["url"] for each in webhooks] == [f"http://{target}/debug/record" for target in targets]
    for each in webhooks:
        assert each["http_config"]["authorization"]["credentials_file"]
        assert each["send_resolved"] is False


def test_alertmanager_reads_its_configuration() -> None:
    program = shutil.which("amtool")
    if program is None:
        pytest.skip("amtool is not installed (it comes with Alertmanager)")
    done = subprocess.run([program, "check-config", str(ALERTMANAGER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
