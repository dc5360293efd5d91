"""docker-compose.yml: valid, every service's flags are the server's, and the parts fit together."""

import argparse
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.core.config import Config
from headrace.core.config.gateway import GatewayConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.decode_address import parse_decodes
from headrace.server.config import gateway as gateway_config
from headrace.server.config.flags import add_flags
from headrace.server.config.load import load
from headrace.server.config.settings import GATEWAY_SETTINGS
from tests.deployment.files import COMPOSE, ROOT, load_yaml

SERVERS = ("prefill", "decode")
BUILT = (*SERVERS, "gateway")
KEY = {"HEADRACE_API_KEY": "a-key"}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<mode>[-?])(?P<word>[^}]*))?\}")


def interpolate(value: Any, environ: dict[str, str]) -> Any:
    """${NAME}, ${NAME:-default} and ${NAME:?message}, as compose does it. Raises KeyError with the message."""

    def one(match: re.Match[str]) -> str:
        if given := environ.get(match["name"], ""):
            return given
        if match["mode"] == "?":
            raise KeyError(match["word"])
        return match["word"] or ""

    if isinstance(value, str):
        return VARIABLE.sub(one, value)
    if isinstance(value, dict):
        return {key: interpolate(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, environ) for item in value]
    return value


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = interpolate(load_yaml(COMPOSE), KEY)
    return document


def configuration(service: dict[str, Any], environ: dict[str, str] | None = None) -> Config:
    """What the server would make of a service's command and environment."""
    assert service["command"][0] == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    flags = vars(parser.parse_args(service["command"][1:]))
    return load(flags, service["environment"] if environ is None else environ)


def test_follows_the_compose_specification() -> None:
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema, which carries the schema, is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("role", SERVERS)
def test_flags_and_environment_make_a_configuration(compose: dict[str, Any], role: str) -> None:
    config = configuration(compose["services"][role])
    assert config.server.role == role
    assert "shm" not in config.transfer.backends, "containers do not share /dev/shm"
    assert config.server.api_keys == ("a-key",)


@pytest.mark.parametrize("role", BUILT)
def test_containers_write_to_volumes_and_temporary_files_alone(compose: dict[str, Any], role: str) -> None:
    service = compose["services"][role]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert [volume.split(":")[1] for volume in service["volumes"]] == ["/models"]


@pytest.mark.parametrize("role", SERVERS)
def test_a_key_is_demanded(compose: dict[str, Any], role: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        configuration(compose["services"][role], environ={})
    with pytest.raises(KeyError, match="key that clients have to show"):
        interpolate(load_yaml(COMPOSE)["services"][role], {})


def test_decode_finds_prefill_and_shows_it_the_key(compose: dict[str, Any]) -> None:
    decode, prefill = (configuration(compose["services"][role]) for role in ("decode", "prefill"))
    (url,) = decode.server.prefill
    assert (urlsplit(url).hostname, urlsplit(url).port) == ("prefill", prefill.server.port)
    assert decode.server.prefill_api_key in prefill.server.api_keys


def test_the_control_endpoint_is_reached_inside_the_network_only(compose: dict[str, Any]) -> None:
    prefill = compose["services"]["prefill"]
    config = configuration(prefill)
    assert config.transfer.host == "0.0.0.0"
    assert {str(config.transfer.control_port), str(config.transfer.data_port)} == set(prefill["expose"])


def test_ports_are_published_on_loopback_and_lead_to_the_servers(compose: dict[str, Any]) -> None:
    published = [port.rsplit(":", 2) for service in compose["services"].values() for port in service["ports"]]
    assert {host for host, _, _ in published} == {"127.0.0.1"}
    assert len({outside for _, outside, _ in published}) == len(published)
    for role in SERVERS:
        (port,) = compose["services"][role]["ports"]
        assert int(port.rsplit(":", 1)[1]) == configuration(compose["services"][role]).server.port


@pytest.mark.parametrize("role", SERVERS)
def test_a_drain_fits_into_the_grace_period(compose: dict[str, Any], role: str) -> None:
    service = compose["services"][role]
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace >= configuration(service).server.drain_timeout_s + 10


def test_what_goes_wrong_in_a_container_ends_there(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["pids_limit"], name
        assert service["mem_limit"], name


def test_no_password_is_a_known_one(compose: dict[str, Any]) -> None:
    assert "admin" not in compose["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]


@pytest.mark.parametrize("role", SERVERS)
def test_the_health_check_asks_for_readiness_at_the_right_port(compose: dict[str, Any], role: str) -> None:
    service = compose["services"][role]
    kind, program, flag, code = service["healthcheck"]["test"]
    assert (kind, program, flag) == ("CMD", "python", "-c")
    compile(code, "healthcheck", "exec")
    assert f"http://127.0.0.1:{configuration(service).server.port}/ready" in code


@pytest.fixture
def gateway(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> GatewayConfig:
    """What the gateway would make of its command and environment."""
    monkeypatch.setattr(gateway_config, "find_spec", lambda _name: object())  # NIXL is in the image, not here
    service = compose["services"]["gateway"]
    assert service["command"][0] == "gateway"
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, GATEWAY_SETTINGS)
    return gateway_config.load_gateway(vars(parser.parse_args(service["command"][1:])), service["environment"])


def options(service: dict[str, Any]) -> dict[str, str]:
    """Flags of a vLLM by name."""
    return dict(flag.removeprefix("--").split("=", 1) for flag in service["command"])


def test_the_gateway_and_vllm_come_with_their_profile_alone(compose: dict[str, Any]) -> None:
    profiles = {name: service["profiles"] for name, service in compose["services"].items() if "profiles" in service}
    assert profiles == {"gateway": ["vllm"], "vllm": ["vllm"]}


def test_the_gateway_finds_both_sides_and_shows_them_the_key(compose: dict[str, Any], gateway: GatewayConfig) -> None:
    vllm, prefill = compose["services"]["vllm"], configuration(compose["services"]["prefill"])
    (decode,) = parse_decodes(gateway.decode)
    assert decode.url == f"http://vllm:{options(vllm)['port']}"
    assert decode.side_channel == f"vllm:{vllm['environment']['VLLM_NIXL_SIDE_CHANNEL_PORT']}"
    assert gateway.prefill == (f"http://prefill:{prefill.server.port}",)
    assert gateway.prefill_api_key in prefill.server.api_keys
    assert gateway.decode_api_key == vllm["environment"]["VLLM_API_KEY"] == gateway.api_keys[0]


def test_vllm_reads_from_the_gateway_inside_the_network_only(compose: dict[str, Any], gateway: GatewayConfig) -> None:
    assert gateway.side_channel_host == "gateway", "the name by which other containers reach it"
    assert compose["services"]["gateway"]["expose"] == [str(gateway.side_channel_port)]
    (published,) = compose["services"]["gateway"]["ports"]
    assert int(published.rsplit(":", 1)[1]) == gateway.port


def test_vllm_computes_what_it_cannot_load(compose: dict[str, Any]) -> None:
    transfer = json.loads(options(compose["services"]["vllm"])["kv-transfer-config"])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", "kv_consumer")
    assert transfer["kv_load_failure_policy"] == "recompute"


def test_prefill_and_vllm_get_the_same_model_and_dtype() -> None:
    document = interpolate(load_yaml(COMPOSE), {**KEY, "HEADRACE_MODEL": "org/model", "HEADRACE_DTYPE": "bfloat16"})
    config, given = configuration(document["services"]["prefill"]), options(document["services"]["vllm"])
    assert (given["model"], given["dtype"]) == ("org/model", "bfloat16")
    assert (config.model.model, config.model.dtype) == ("org/model", "bfloat16")


def test_waits_for_services_that_have_a_health_check(compose: dict[str, Any]) -> None:
    services = compose["services"]
    waits = {
        (name, other): wait["condition"]
        for name, service in services.items()
        for other, wait in service.get("depends_on", {}).items()
    }
    assert waits[("decode", "prefill")] == "service_healthy"
    assert all("healthcheck" in services[other] for _, other in waits)


def test_mounts_exist_and_volumes_are_declared(compose: dict[str, Any]) -> None:
    used = set()
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert mount.endswith(":ro")
            else:
                used.add(source)
    assert used == set(compose["volumes"])


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]
