"""Builds and checks the configuration of a gateway: of `headrace gateway`, or as a child of `headrace serve`."""

from collections.abc import Mapping
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import msgspec

from headrace.core.config import Config
from headrace.core.config.gateway import GatewayConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import is_loopback, is_wildcard, url
from headrace.core.types.peers.decode_address import parse_decodes, server_url
from headrace.server.config.load import read_values
from headrace.server.config.settings import GATEWAY_SETTINGS
from headrace.transfer.sockets.curve_keys import ServerKeys, known_servers

_FIELDS = {setting.key: setting.field for setting in GATEWAY_SETTINGS}


def load_gateway(flags: Mapping[str, Any], environ: Mapping[str, str]) -> GatewayConfig:
    """The configuration that flags (by key, as argparse left them), a file and the environment describe.

    Raises ConfigError for unknown keys, wrong types, values out of bounds and settings that contradict each other.
    """
    values = read_values(flags, environ, GATEWAY_SETTINGS)
    config = GatewayConfig(**{_FIELDS[key]: value for key, value in values.items()})
    config = msgspec.structs.replace(config, prefill=tuple(each.rstrip("/") for each in config.prefill))
    check_gateway(config)
    _check_installed()
    return config


def gateway_of(config: Config) -> GatewayConfig | None:
    """The gateway that a prefill server starts; None if it starts none. Raises ConfigError."""
    server, transfer = config.server, config.transfer
    if not server.gateway_decode:
        return None
    host = "127.0.0.1" if is_wildcard(server.host) else server.host
    gateway = GatewayConfig(
        decode=server.gateway_decode,
        prefill=(url("http", host, server.port),),
        host=server.host,
        port=server.gateway_port,
        side_channel_host=transfer.host,
        max_body_bytes=server.max_body_bytes,
        keep_alive_s=server.keep_alive_s,
        drain_timeout_s=server.drain_timeout_s,
        api_keys=server.api_keys,
        allowed_hosts=server.allowed_hosts,
        prefill_api_key=server.api_keys[0] if server.api_keys else "",
        decode_api_key=server.gateway_decode_api_key,
        insecure_decode=server.trusted_network or server.insecure,
        insecure=server.insecure,
        log_level=server.log_level,
        log_format=server.log_format,
    )
    parse_decodes(gateway.decode, "--gateway-decode")
    check_gateway(gateway)
    _check_installed()
    return gateway


def check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError for what is missing, and for the first combination that cannot work."""
    if not config.decode:
        raise ConfigError(
            "a gateway needs decode engines: add --decode http://HOST:PORT, or --decode http://HOST:PORT=HOST:5600 "
            "with the side channel (once per engine)"
        )
    if not config.prefill:
        raise ConfigError("a gateway needs prefill servers: add --prefill http://HOST:PORT (once per server)")
    urls = decode_urls(config)
    for each in config.prefill:
        server_url(each, "--prefill")
        if each in urls:
            raise ConfigError(f"--prefill and --decode both name {each}; a server is one or the other")
    if twice := sorted({each for each in config.prefill if config.prefill.count(each) > 1}):
        raise ConfigError(f"--prefill {twice[0]} is given more than once; once is enough")
    if config.remote != "always" and config.decode_engine == "sglang":
        raise ConfigError(
            f"--remote {config.remote} is for vLLM: an SGLang engine takes the KV of every prompt; leave it out"
        )
    for key, given in (
        ("decode-prefill-rate", config.decode_prefill_rate),
        ("decode-kv-events-port", config.decode_kv_events_port),
    ):
        if given and config.remote != "cost":
            raise ConfigError(f"--{key} is for comparing costs; add --remote cost or leave it out")
    if config.lease_limit_s < config.lease_s:
        raise ConfigError(
            f"--lease-limit {config.lease_limit_s:g} is shorter than --lease {config.lease_s:g}; write a longer one"
        )
    if config.decode_engine == "sglang" and config.device != "cpu":
        raise ConfigError(
            f"--device {config.device} is for vLLM decode engines; leave it out with --decode-engine sglang"
        )
    _check_keys(config)
    _check_binds(config)


def decode_urls(config: GatewayConfig) -> tuple[str, ...]:
    """URLs of the decode engines' HTTP servers. Raises ConfigError."""
    if config.decode_engine == "vllm":
        return tuple(one.url for one in parse_decodes(config.decode))
    for each in config.decode:
        if "=" in each:
            raise ConfigError(f"--decode {each}: SGLang decode engines have no side channel; write their URL alone")
    return tuple(server_url(each, "--decode") for each in config.decode)


def _check_keys(config: GatewayConfig) -> None:
    for key in (*config.api_keys, config.prefill_api_key, config.decode_api_key):
        if not key.isascii() or any(character.isspace() for character in key):
            raise ConfigError("an API key has to be ASCII without spaces; write another one")
    if bool(config.curve_key) != bool(config.curve_server_keys):
        missing = "curve-server-key" if config.curve_key else "curve-key"
        raise ConfigError(
            f"--curve-key and --curve-server-key go together: add --{missing} FILE (headrace keys FOLDER)"
        )
    keys = known_servers(config.curve_key, config.curve_server_keys) or ServerKeys(())
    for each in config.prefill if config.curve_key else ():
        if not keys.of(each):
            raise ConfigError(f"no --curve-server-key is for {each}: add HOST=FILE, or a FILE for all servers")
    if config.curve_key and not config.insecure_decode:
        raise ConfigError(
            "--curve-key encrypts the way from the prefill servers only: decode engines read KV by NIXL and a side "
            "channel, which know no encryption and no keys. Add --insecure-decode if no other host reaches "
            f"{config.side_channel_host}, or leave --curve-key out"
        )


def _check_binds(config: GatewayConfig) -> None:
    side = config.side_channel_host
    if is_wildcard(side):
        raise ConfigError(
            f"--side-channel-host {side} is no address that decode engines could connect to; write the one by which "
            "they reach this machine"
        )
    if not is_loopback(side) and not config.insecure_decode:
        raise ConfigError(
            f"--side-channel-host {side} is reachable from other machines, and who reaches it reads the KV of all "
            "prompts: bind to 127.0.0.1, or add --insecure-decode if only machines that you trust reach it"
        )
    if not config.api_keys and not config.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} is reachable from other machines and no API key is set: add --api-key KEY "
            "(or set HEADRACE_API_KEY), bind to 127.0.0.1, or add --insecure to serve all of them"
        )
    ports = {"port": config.port, "side-channel-port": config.side_channel_port}
    if config.decode_engine == "sglang":
        ports["bootstrap-port"] = config.bootstrap_port
    for (one, port), (other, same) in combinations(ports.items(), 2):
        if port and port == same:
            raise ConfigError(f"--{one} and --{other} are both {port}; write another one of them")


def _check_installed() -> None:
    if find_spec("nixl") is None:
        raise ConfigError("a gateway needs NIXL: pip install 'headrace[nixl,server]'")
