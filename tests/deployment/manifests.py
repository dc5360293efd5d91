"""Kubernetes objects: the pods in them, and what their commands mean to the server."""

import argparse
from collections.abc import Iterator
from typing import Any

from headrace.core.config import Config
from headrace.server.config.flags import add_flags
from headrace.server.config.load import load

Object = dict[str, Any]
KEYS = {"HEADRACE_API_KEY": "a-key", "HEADRACE_PREFILL_API_KEY": "a-key", "HEADRACE_STAGE_KEY": "a-stage-key"}


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return found


def pods(objects: list[Object]) -> Iterator[Object]:
    """Every pod template."""
    for each in objects:
        if each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            yield template["leaderTemplate"]
            yield template["workerTemplate"]
        elif each["kind"] in ("StatefulSet", "Deployment"):
            yield each["spec"]["template"]


def containers(objects: list[Object], name: str = "") -> list[Object]:
    return [each for pod in pods(objects) for each in pod["spec"]["containers"] if name in ("", each["name"])]


def configuration(container: Object) -> Config:
    """What the server makes of a container's arguments and environment."""
    command, *flags = container["args"]
    assert command == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    names = [each["name"] for each in container["env"]]
    return load(vars(parser.parse_args(flags)), {name: value for name, value in KEYS.items() if name in names})
