"""The deployment files of this repository, loaded."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(sorted(link.name for link in (ROOT / "src/headrace").iterdir() if link.is_symlink()))
"""The packages of the program: all that imports as headrace.*"""
DASHBOARD = ROOT / "configs/grafana/dashboards/headrace.json"
RULES = ROOT / "configs/rules/headrace.yml"
NOT_ON_PANELS = ROOT / "configs/grafana/not_on_panels.yml"
ALERTMANAGER = ROOT / "configs/alertmanager.yml"
PROMETHEUS = ROOT / "configs/prometheus.yml"
COMPOSE = ROOT / "docker-compose.yml"


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def promtool(*arguments: str) -> None:
    """Run promtool and fail with its output; skip where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
