"""Checks for settings that contradict each other; each error says what to write instead."""

import re
from importlib.util import find_spec
from urllib.parse import urlsplit

from headrace.core.config import Config, GroupConfig, RecordingConfig, SchedulerConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.backends import NIXL
from headrace.core.types.named_values import named_values
from headrace.core.types.peers.addresses import is_loopback
from headrace.core.types.peers.allow_list import allowed_prefills, parse_allowed
from headrace.core.types.peers.decode_address import server_url
from headrace.core.types.requests.adapters import adapter_folders
from headrace.core.types.requests.tenants import priority_ranges, tenant_keys
from headrace.engine.kv.tiers.kv_source import is_url

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
MAX_RANKS = 64  # stages of a server that peers take (MAX_STAGES of the protocol)


def check(config: Config) -> None:
    """Raises ConfigError for the first combination that cannot work."""
    _check_role(config)
    _check_adapters(config)
    _check_binds(config)
    _check_ports(config)
    _check_engine(config)
    _check_stages(config)
    _check_replicas(config)
    _check_external_stages(config)
    _check_external_replicas(config)
    _check_kv_events(config)
    _check_nixl(config)
    _check_curve(config)
    _check_tracing(config)
    _check_recording(config)
    _check_gateway(config)


def _check_role(config: Config) -> None:
    server = config.server
    if server.role != "decode":
        for key, given in (
            ("prefill", server.prefill),
            ("allow-prefill", server.allow_prefill),
            ("prefill-api-key", server.prefill_api_key and not server.fetches_kv),
            ("kv-return", server.kv_return),
            ("audit-rate", server.audit_rate),
            ("fallback", server.fallback != "none"),
            ("remote", server.remote != "always"),
            ("hedge", server.hedge),
        ):
            if given:
                raise ConfigError(f"--{key} is for decode servers; add --role decode or leave it out ({server.role})")
    elif not server.prefill and not server.allow_prefill and server.fallback != "local" and server.remote != "never":
        raise ConfigError(
            "a decode server needs prefill servers: add --prefill http://HOST:PORT (once per server), "
            "--allow-prefill HOST:PORT for those that requests name, or --fallback local to compute prompts itself"
        )
    elif config.scheduler.promise != "off":
        raise ConfigError("--promise is about prompts that are computed here; add it to the prefill servers instead")
    elif server.remote == "cost" and not server.prefill:
        raise ConfigError(
            "--remote cost compares with prefill servers: add --prefill http://HOST:PORT (once per server)"
        )
    if server.hedge and (server.hedge < 1 or len(server.prefill) < 2):
        wrong = "has to be at least 1, or 0" if server.hedge < 1 else "needs a second --prefill http://HOST:PORT"
        raise ConfigError(f"--hedge {server.hedge:g} {wrong}")
    for key, listed in (("sibling", server.siblings), ("accept-return", server.accept_returns)):
        if listed and server.role != "prefill":
            raise ConfigError(f"--{key} is for prefill servers; add --role prefill or leave it out ({server.role})")
    for url in server.prefill:
        server_url(url, "--prefill")
    for url in server.siblings:
        server_url(url, "--sibling")
    for text in server.accept_returns:
        parse_allowed(text, "--accept-return")
    allowed_prefills(server.prefill, server.allow_prefill)
    if duplicates := sorted({url for url in server.prefill if server.prefill.count(url) > 1}):
        raise ConfigError(f"--prefill {duplicates[0]} is given more than once; once is enough")


def _check_adapters(config: Config) -> None:
    for name in adapter_folders(config.model.lora):
        if name in (config.model_name, config.model.model):
            raise ConfigError(f"--lora {name}=…: the model itself has this name; write another one")


def _check_tracing(config: Config) -> None:
    tracing = config.tracing
    named_values(tracing.attributes, "--trace-attribute")
    for name, value in named_values(tracing.headers, "--otlp-header").items():
        if not _HEADER_NAME.fullmatch(name) or not value.isascii():
            raise ConfigError("--otlp-header: the name or the value of one of them is not of an HTTP header")
    if not tracing.endpoint:
        return
    parts = urlsplit(tracing.endpoint)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.username or parts.query or parts.fragment:
        raise ConfigError(
            "--otlp-traces-endpoint (OTEL_EXPORTER_OTLP_ENDPOINT) is no address of a collector; write it like "
            "http://127.0.0.1:4318, and a key with --otlp-header"
        )
    if not installed("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
        raise ConfigError(
            "--otlp-traces-endpoint (OTEL_EXPORTER_OTLP_ENDPOINT) needs OpenTelemetry's SDK: "
            "pip install 'headrace[tracing]'"
        )


def _check_recording(config: Config) -> None:
    recording, engine = config.recording, config.engine
    if not recording.folder:
        for key, given in (
            ("record-minutes", recording.minutes != RecordingConfig().minutes),
            ("record-tokens", recording.tokens),
        ):
            if given:
                raise ConfigError(f"--{key} is for recordings: add --record DIR, or leave it out")
        return
    tiers = (("host-pages", engine.host_pages), ("disk-path", engine.disk_path), ("kv-library", engine.kv_library))
    for key, used in tiers:
        if used and not recording.tokens:
            raise ConfigError(
                f"--record cannot hide token ids on a server with --{key}, whose pages are named by digests of them: "
                "add --record-tokens, or leave one of them out"
            )


def installed(*modules: str) -> bool:
    """Whether these modules can be imported; the packages around them are."""
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:
        return False


def _check_binds(config: Config) -> None:
    server = config.server
    priority_ranges(server.priority_ranges)
    for key in (*server.api_keys, *tenant_keys(server.tenant_keys).values()):
        if not key.isascii() or any(character.isspace() for character in key):
            raise ConfigError("an API key has to be ASCII without spaces; write another one with --api-key")
    if server.insecure:
        return
    if not server.api_keys and not server.tenant_keys and not is_loopback(server.host):
        raise ConfigError(
            f"--host {server.host} is reachable from other machines and no API key is set: add --api-key KEY "
            f"(or set HEADRACE_API_KEY), bind to 127.0.0.1, or add --insecure to serve all of them"
        )
    if server.trusted_network:
        return
    transfer, events = config.transfer, config.kv_events
    otherwise = "bind to 127.0.0.1, or add --trusted-network if only machines that you trust reach the port"
    if not is_loopback(transfer.host) and not transfer.curve_key:
        raise ConfigError(
            f"--transfer-host {transfer.host} is reachable from other machines, and an API key protects neither the "
            "control endpoint nor the data ports: add --curve-key and --curve-allowed (headrace keys FOLDER), "
            f"{otherwise}"
        )
    if events.port and not is_loopback(events.host):
        raise ConfigError(
            f"--kv-events-host {events.host} is reachable from other machines, and every client that connects reads "
            f"the token ids of all prompts: {otherwise}"
        )


def _check_gateway(config: Config) -> None:
    """The gateway that a prefill server starts. What it is made of is checked by headrace.server.config.gateway."""
    server = config.server
    if not server.gateway_decode:
        return
    by_itself = "run headrace gateway beside it, with keys of its own"
    if server.role != "prefill":
        raise ConfigError(
            f"--gateway-decode is for prefill servers; add --role prefill or leave it out ({server.role})"
        )
    if config.transfer.curve_key:
        raise ConfigError(
            f"--gateway-decode starts a gateway without CURVE keys, which --curve-key asks for: {by_itself}"
        )
    if server.tenant_keys and not server.api_keys:
        raise ConfigError(
            f"--gateway-decode needs an --api-key that its gateway sends to this server: add one, or {by_itself}"
        )
    if server.gateway_port and server.gateway_port in (server.port, server.bootstrap_port):
        raise ConfigError(f"--gateway-port {server.gateway_port} is another port of this server; write another one")


def _check_replicas(config: Config) -> None:
    scheduler = config.scheduler
    if scheduler.dp == 1:
        return
    engine = config.engine
    if config.group.start == "external" and engine.expert_parallel and engine.exchange == "auto":
        raise ConfigError(
            "external ranks may have another device than this machine, by which --exchange auto chooses: "
            "write --exchange allgather or --exchange alltoall"
        )
    if (ranks := len(scheduler.layout.ranks)) > MAX_RANKS:
        most = max(1, MAX_RANKS // scheduler.stages)
        raise ConfigError(f"--pp {scheduler.stages} --dp {scheduler.dp} are {ranks} stages; write --dp {most} or less")


def _check_ports(config: Config) -> None:
    data_port, ranks = config.transfer.data_port, config.scheduler.layout.ranks
    member = config.group.member
    here = config.group.start == "local"  # other machines have ports of their own
    ports = (
        ("port", config.server.port),
        ("bootstrap-port", config.server.bootstrap_port if config.server.role == "prefill" else 0),
        ("control-port", config.transfer.control_port),
        ("stage-port", config.group.port),
        ("dp-external", member.port if member is not None and member.rank == 0 else 0),
        ("kv-events-port", config.kv_events.port),
        ("kv-events-replay-port", config.kv_events.replay_port),
        *(("data-port", data_port + rank) for rank in (ranks if data_port and here else ())),
    )
    for index, (key, port) in enumerate(ports):
        for other, other_port in ports[:index]:
            if port and port == other_port:
                raise ConfigError(f"--{key} and --{other} are both {port}: give each a port of its own, or 0")


def _check_engine(config: Config) -> None:
    engine, model = config.engine, config.model
    if engine.page_size & (engine.page_size - 1):
        below = 1 << (engine.page_size.bit_length() - 1)
        raise ConfigError(
            f"--page-size {engine.page_size} is no power of two: write --page-size {below} or --page-size {2 * below}"
        )
    tiers = (("host-pages", engine.host_pages), ("disk-path", engine.disk_path), ("kv-library", engine.kv_library))
    for key, given in tiers:
        if given and not config.scheduler.prefix_cache:
            raise ConfigError(
                f"--{key} keeps pages of the prefix cache, which --no-prefix-cache disables: leave one of them out"
            )
    if engine.disk_path and not engine.disk_gib:
        raise ConfigError("--disk-path needs room: write --disk-gib 1 or more, or leave it out")
    for place in engine.kv_library:
        if "://" in place and not is_url(place):
            raise ConfigError(
                f"--kv-library {place} is neither a folder nor a store: write a path, or an address of http:// or https://"
            )
    if engine.exchange != "auto" and not engine.expert_parallel:
        raise ConfigError(
            f"--exchange {engine.exchange} is for experts that ranks share: add --expert-parallel, or leave it out"
        )
    _check_overlap(config)
    if model.max_model_len == 1:
        raise ConfigError("--max-model-len 1 leaves no room for a token after the prompt: write 2 or more, or 0")


def _check_overlap(config: Config) -> None:
    scheduler, engine, default = config.scheduler, config.engine, SchedulerConfig()
    if not engine.overlap:
        for key, given, usual in (
            ("prefill", scheduler.overlap_prefill_tokens, default.overlap_prefill_tokens),
            ("decode", scheduler.overlap_decode_tokens, default.overlap_decode_tokens),
        ):
            if given != usual:
                raise ConfigError(f"--overlap-{key}-tokens is a threshold of --overlap: add it, or leave this out")
        return
    if scheduler.dp == 1 or not engine.expert_parallel:
        raise ConfigError(
            "--overlap hides the exchange of tokens between replicas that share experts: write --dp 2 or more and "
            "--expert-parallel beside it, or leave it out"
        )
    threshold, budget = scheduler.overlap_prefill_tokens, scheduler.chunk_tokens
    if config.server.role == "prefill" and 0 < budget < threshold:  # 0: not decided yet
        raise ConfigError(
            f"--overlap cuts passes of {threshold} tokens or more and --chunk-tokens {budget} allows none: write "
            f"--chunk-tokens {threshold} or more, or --overlap-prefill-tokens {max(2, budget)} or less"
        )


def _check_stages(config: Config) -> None:
    stages, layers, first = config.scheduler.stages, config.engine.pp_layers, config.transfer.data_port
    if layers and len(layers) != stages:
        shown = ",".join(map(str, layers))
        raise ConfigError(f"--pp-layers {shown} is for {len(layers)} stages and --pp is {stages}: make them agree")
    if layers and min(layers) < 1:
        raise ConfigError("--pp-layers has a stage without a layer: give every stage 1 or more")
    count, word = len(config.scheduler.layout.ranks), "stages" if config.scheduler.tp == 1 else "ranks"
    if first and first + count - 1 > 65535:
        raise ConfigError(f"--data-port {first} leaves no port for {count} {word}: write {65536 - count} or less")


def _check_external_stages(config: Config) -> None:
    group = config.group
    if group.start == "local":
        for key, given in (("stage-host", group.host != GroupConfig().host), ("stage-port", group.port)):
            if given:
                raise ConfigError(
                    f"--{key} is for stages that are started elsewhere; add --stages external, or leave it out"
                )
        return
    if not group.key and not config.server.insecure and not is_loopback(group.host):
        raise ConfigError(
            f"--stage-host {group.host} is reachable from other machines and no stage key is set: set "
            f"HEADRACE_STAGE_KEY here and for the stages, bind to 127.0.0.1, or add --insecure to let all of them join"
        )
    if config.model.dtype == "auto":
        raise ConfigError("--stages external needs --dtype: the devices of the stages' machines are not known here")


def _check_external_replicas(config: Config) -> None:
    """--dp-external, and what it needs or excludes."""
    group, scheduler, member = config.group, config.scheduler, config.group.member
    if member is None:
        if group.dp_sync != GroupConfig().dp_sync:
            raise ConfigError(f"--dp-sync {group.dp_sync} is for servers with --dp-external: add that, or leave it out")
        return
    if scheduler.dp > 1:
        raise ConfigError(
            f"--dp-external is for one replica in each server and --dp is {scheduler.dp}: leave --dp out, and start a "
            f"server for each of {member.size * scheduler.dp} replicas, or leave --dp-external out"
        )
    if scheduler.stages > 1:
        raise ConfigError(
            f"--dp-external is for servers of one stage and --pp is {scheduler.stages}: write --pp 1 and a higher --tp "
            f"or SIZE, or --dp {member.size} in place of --dp-external"
        )
    if group.start == "external":
        raise ConfigError(
            f"--dp-external is for local ranks: write --stages local, or --dp {member.size} in place of --dp-external"
        )
    if not config.engine.expert_parallel:
        raise ConfigError(
            "--dp-external is for servers that share experts: add --expert-parallel, or leave it out: servers "
            "that share none need not know of each other"
        )
    if not is_loopback(member.host) and not (config.server.trusted_network or config.server.insecure):
        raise ConfigError(
            f"--dp-external {member}: other machines reach the store and the ranks, which have neither keys nor "
            f"encryption: write 127.0.0.1, or add --trusted-network if only machines that you trust reach them"
        )


def _check_nixl(config: Config) -> None:
    if NIXL in config.transfer.backends and config.transfer.curve_key:
        raise ConfigError(
            "--transfer-backends names nixl, which moves KV unencrypted, and --curve-key requires encryption: "
            "leave one of them out"
        )


def _check_kv_events(config: Config) -> None:
    events = config.kv_events
    if events.replay_port and not events.port:
        raise ConfigError("--kv-events-replay-port replays published events: add --kv-events-port, or leave it out")
    if events.port and not config.scheduler.prefix_cache:
        raise ConfigError(
            "--kv-events-port needs the prefix cache, which --no-prefix-cache disables: leave one of them out"
        )


def _check_curve(config: Config) -> None:
    """Keys that have no effect in this role, and missing keys that would leave connections unauthenticated."""
    transfer, server = config.transfer, config.server
    if transfer.curve_key and server.role == "colocated":
        raise ConfigError("--curve-key is for prefill and decode servers: no peer connects to a colocated one")
    if transfer.curve_allowed and not server.serves_kv:
        raise ConfigError(f"--curve-allowed is for prefill servers, where peers connect; leave it out ({server.role})")
    if server.curve_server_keys and not server.fetches_kv:
        raise ConfigError(f"--curve-server-key is for decode servers, which connect; leave it out ({server.role})")
    for key, given in (("curve-allowed", transfer.curve_allowed), ("curve-server-key", server.curve_server_keys)):
        if given and not transfer.curve_key:
            raise ConfigError(f"--{key} needs this server's own keys, too: add --curve-key FILE (headrace keys FOLDER)")
    if transfer.curve_key and server.serves_kv and not transfer.curve_allowed:
        raise ConfigError(
            "--curve-key without --curve-allowed would let every host connect that has the public key: add "
            "--curve-allowed FOLDER with the public keys of the servers that connect"
        )
    if transfer.curve_key and server.fetches_kv and not server.curve_server_keys:
        connects = "a decode server" if server.role == "decode" else "a server with --sibling or --accept-return"
        raise ConfigError(
            f"--curve-key of {connects} needs the other servers' public keys, too: add --curve-server-key FILE"
        )
